"""The picture of a run's reward over its steps, drawn from ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ajgrpo.loggers import read_metrics


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the up to ``window - 1`` values before it. Float [N] → float [N]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot_reward_curve(metrics_jsonl: str | Path, out_png: str | Path) -> Path | None:
    """Draws the mean reward of each log window and its moving average.

    Args:
        metrics_jsonl: a run's ``metrics.jsonl``.
        out_png: the picture to write.

    Returns:
        The picture's path, or None (and no picture) when no window has a reward.
    """
    # Not pyplot: it keeps state of its own and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [(record["step"], record["reward"]) for record in read_metrics(metrics_jsonl) if _has_reward(record)]
    if not points:
        return None
    steps, rewards = np.array(points, dtype=np.float64).T
    window = max(len(rewards) // 10, 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, marker=".", label="reward")
    axes.plot(steps, moving_average(rewards, window), color="tab:blue", linewidth=2, label=f"mean of {window} windows")
    axes.set(xlabel="optimizer step", ylabel="reward", title="Mean reward of the rollouts")
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(out_png)
    figure.savefig(path, dpi=120)
    return path


def _has_reward(record: dict[str, float | None]) -> bool:
    return record.get("reward") is not None

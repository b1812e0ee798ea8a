"""Reporters: where the metrics of each log window go.

``metrics.jsonl`` is always written; trackers come from ``report_to``; the console shows progress. A tracker's package
is imported when its reporter is made, so that nobody needs all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ajgrpo.config import SECRETS, AsyncGRPOConfig
from ajgrpo.errors import ConfigError

METRICS_FILE = "metrics.jsonl"


class Reporter(Protocol):
    """Receives the metrics of each log window."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of the window that ends with optimizer step ``step``."""

    def close(self) -> None:
        """Writes what is buffered and releases what is held."""


class Reporters:
    """Several reporters as one. Each is closed, whatever closing another raises."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self.reporters = tuple(reporters)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for reporter in self.reporters:
            reporter.log(step, metrics)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for reporter in self.reporters:
                stack.callback(reporter.close)


def build_reporters(config: AsyncGRPOConfig, output_dir: str | Path, resumed_step: int = 0) -> Reporters:
    """The reporters that ``config`` asks for.

    Args:
        output_dir: where files go; made if missing.
        resumed_step: the optimizer step that training resumes after; 0 for a new run.

    Raises:
        ConfigError: when a tracker's package is not installed.
    """
    directory = Path(output_dir)
    trackers: dict[str, Callable[[AsyncGRPOConfig, Path, int], Reporter]] = {
        "tensorboard": TensorBoardReporter,
        "wandb": WandbReporter,
        "trackio": TrackioReporter,
    }
    for name in config.report_to:
        require_tracker(name)
    reporters: list[Reporter] = [MetricsFile(directory / METRICS_FILE, resumed_step)]
    reporters.extend(trackers[name](config, directory, resumed_step) for name in config.report_to)
    if not config.disable_tqdm:
        reporters.append(ConsoleProgress(config))
    return Reporters(reporters)


def require_tracker(name: str) -> Any:
    """The module of a tracker.

    Raises:
        ConfigError: naming the extra to install, when the package is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"report_to {name!r} needs the package {name!r}: pip install 'ajgrpo[{name}]', or take it out of report_to"
        ) from error


def public_config(config: AsyncGRPOConfig) -> dict[str, Any]:
    """The fields of ``config`` by name, without secrets."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in SECRETS}


class MetricsFile:
    """``metrics.jsonl``: one JSON object per log window, ``{"step": 3, "loss": 0.1, ...}``, flushed at once.

    A metric that is not a finite number becomes ``null``. A resumed run appends, after dropping the windows that end
    later than ``resumed_step`` (they will be trained again). A new run moves an earlier run's file aside.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step and path.exists():
            kept = [record for record in read_metrics(path) if record["step"] <= resumed_step]
            rewritten = path.with_suffix(".tmp")
            rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept))
            rewritten.replace(path)
        elif path.exists():
            taken = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
            path.rename(path.with_name(f"{path.stem}.{taken + 1}{path.suffix}"))
        self._file = path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step, **{name: value if math.isfinite(value) else None for name, value in metrics.items()}}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line that a crash cut short is left out."""
    lines = Path(path).read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


class TensorBoardReporter:
    """Writes event files for TensorBoard under ``<output_dir>/tensorboard``, without TensorFlow or PyTorch."""

    def __init__(self, config: AsyncGRPOConfig, output_dir: Path, resumed_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._writer = EventFileWriter(str(output_dir / "tensorboard"))
        if resumed_step:
            # TensorBoard forgets the points of earlier files from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbReporter:
    """Sends metrics to Weights & Biases; the project is ``WANDB_PROJECT`` or "ajgrpo"."""

    def __init__(self, config: AsyncGRPOConfig, output_dir: Path, resumed_step: int = 0) -> None:
        self._run = require_tracker("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "ajgrpo"),
            name=config.run_name,
            config=public_config(config),
            dir=str(output_dir),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioReporter:
    """Sends metrics to Trackio; the project is ``TRACKIO_PROJECT`` or "ajgrpo"."""

    def __init__(self, config: AsyncGRPOConfig, output_dir: Path, resumed_step: int = 0) -> None:
        self._trackio = require_tracker("trackio")
        self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "ajgrpo"), name=config.run_name, config=public_config(config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


SHOWN = {"reward": "reward", "loss": "loss", "perf/wall_clock_forwarded_tokens_per_s": "tokens/s"}
"""The metrics that the console shows, with their short names."""


class ConsoleProgress:
    """A progress bar on a terminal; elsewhere one line per log window.

    The bar counts optimizer steps up to ``max_steps``, or epochs up to ``num_train_epochs``.

    Args:
        stream: where to write; standard error by default, so that standard output stays free for results.
    """

    def __init__(self, config: AsyncGRPOConfig, stream: TextIO | None = None) -> None:
        self._by_step = config.max_steps > 0
        self._total = float(config.max_steps if self._by_step else config.num_train_epochs)
        console = Console(file=sys.stderr if stream is None else stream)
        self._print = console.out
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("waiting for the first step", total=self._total)
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = self.describe(step, metrics)
        if self._progress is None:
            self._print(line, highlight=False)
        else:
            completed = step if self._by_step else metrics.get("epoch", 0.0)
            self._progress.update(self._task, description=line, completed=completed)

    def describe(self, step: int, metrics: Mapping[str, float]) -> str:
        """One line, for example ``"step 3/20  reward 0.41  loss 0.012  tokens/s 913"``."""
        parts = [f"step {step}/{self._total:.0f}" if self._by_step else f"step {step}"]
        if not self._by_step and "epoch" in metrics:
            parts.append(f"epoch {metrics['epoch']:.2f}/{self._total:g}")
        parts += [f"{short} {metrics[name]:.4g}" for name, short in SHOWN.items() if name in metrics]
        return "  ".join(parts)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

"""Rewards of a group and the advantages made of them.

A reward function is called once per group with keyword arguments ``prompts``, ``completions``, ``completion_ids`` and
every other column of the dataset, each a list with one entry per rollout, and returns one number or None per rollout.
None means "not applicable here". Anything else (NaN, infinity, text, another length) is a mistake that would poison
the gradient, so it stops the run with the function's name, the value and the rule.

A group's functions run at the same time, synchronous ones in threads; groups are scored one after another, so a
function never runs beside itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import inspect
import math
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ajgrpo.errors import RewardError
from ajgrpo.metrics import Metrics
from ajgrpo.types import RolloutGroup

RewardFunction = Callable[..., Any]

ROLLOUT_SOURCE = "rollout"
"""Name, in the metrics, of rewards that a custom loop sets on its rollouts."""

ADVANTAGE_EPSILON = 1e-6
"""Added to the standard deviation: rewards that differ only by rounding must not become advantages of ±1."""

RULE = "it must return one finite number, or None (not applicable), for each completion"


class RewardRaisedError(RewardError):
    """A reward function raised; unlike a value of the wrong kind, that may pass (a judge that did not answer)."""


@dataclasses.dataclass(frozen=True)
class SourceRewards:
    """What one source gave each rollout: float64 [G], NaN where it does not apply."""

    name: str
    values: np.ndarray


class Scorer:
    """Calls the reward functions.

    Args:
        functions: plain or ``async`` functions, partials of them, or callable instances.
    """

    def __init__(self, functions: Sequence[RewardFunction]):
        self._functions = list(zip(unique_names(functions), functions, strict=True))
        self._threads = concurrent.futures.ThreadPoolExecutor(max(len(functions), 1), "reward")

    async def score(self, group: RolloutGroup) -> list[SourceRewards]:
        """The rewards of every source that has a say, functions first.

        Raises:
            RewardError: a function raised or returned something unusable.
        """
        sources = list(await asyncio.gather(*(self._call(name, function, group) for name, function in self._functions)))
        if any(reward is not None for reward in group.rollout_rewards):
            sources.append(SourceRewards(ROLLOUT_SOURCE, checked_rewards(ROLLOUT_SOURCE, group.rollout_rewards, group)))
        if kinds := {entry[0].__name__ for entry in group.env_rewards if entry is not None}:
            values = [math.nan if entry is None else entry[1] for entry in group.env_rewards]
            sources.append(SourceRewards(" or ".join(sorted(kinds)), np.array(values)))
        return sources

    def close(self) -> None:
        """Lets go of the threads without waiting for a function that still runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, name: str, function: RewardFunction, group: RolloutGroup) -> SourceRewards:
        arguments = {
            **group.reward_kwargs,
            "prompts": group.prompts,
            "completions": group.completions,
            "completion_ids": group.completions_ids,
        }
        try:
            if is_async(function):
                returned = function(**arguments)
            else:
                call = functools.partial(function, **arguments)
                returned = await asyncio.get_running_loop().run_in_executor(self._threads, call)
            if inspect.isawaitable(returned):  # an async function behind a plain decorator
                returned = await returned
        except Exception as exc:  # whatever user code raises is reported under the function's name
            hint = ""
            if isinstance(exc, TypeError) and "unexpected keyword argument" in str(exc):
                hint = "; every dataset column is passed to it, so let it accept **kwargs"
            raise RewardRaisedError(f"reward function {name!r} raised {type(exc).__name__}: {exc}{hint}") from exc
        return SourceRewards(name, checked_rewards(name, returned, group))


def checked_rewards(name: str, returned: Any, group: RolloutGroup) -> np.ndarray:
    """What a source returned as float64 [G], None as NaN.

    Raises:
        RewardError: it is no sequence of G finite numbers or None.
    """
    size = len(group.completions)
    if isinstance(returned, str | bytes) or not isinstance(returned, Sequence | np.ndarray):
        raise RewardError(f"reward function {name!r} returned {returned!r:.200} ({type(returned).__name__}); {RULE}")
    if len(returned) != size:
        raise RewardError(f"reward function {name!r} returned {len(returned)} values for {size} completions; {RULE}")
    values = np.full(size, np.nan)
    for index, value in enumerate(returned):
        if value is None:
            continue
        if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
            raise RewardError(
                f"reward function {name!r} returned {value!r:.200} ({type(value).__name__}) for completion {index} of "
                f"row {group.row_index}; {RULE}"
            )
        values[index] = float(value)
    return values


def unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """A name for each function, as used in ``rewards/{name}/…``; the second of a name becomes ``name_2``."""
    seen: Counter[str] = Counter()
    names = []
    for function in functions:
        name = function_name(function)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def function_name(function: RewardFunction) -> str:
    """A function's own name, that of a partial's function, or the class name of a callable instance."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: RewardFunction) -> bool:
    """Whether a call gives an awaitable."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def total_rewards(sources: Sequence[SourceRewards], size: int) -> np.ndarray:
    """float64 [G]: the sum over the sources that apply to each rollout, NaN where none does."""
    if not sources:
        return np.full(size, np.nan)
    table = np.stack([source.values for source in sources])
    return np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(table, axis=0))


def has_signal(rewards: np.ndarray) -> bool:
    """Whether the group can teach anything: at least two scored rollouts that are not all equal."""
    scored = rewards[~np.isnan(rewards)]
    return len(scored) >= 2 and bool(scored.min() < scored.max())


def standardized_advantages(rewards: np.ndarray) -> np.ndarray:
    """float64 [G]: (r - mean) / (population std + ``ADVANTAGE_EPSILON``) over the scored rollouts, 0 elsewhere."""
    scored = ~np.isnan(rewards)
    advantages = np.zeros(len(rewards))
    if scored.any():
        values = rewards[scored]
        advantages[scored] = (values - values.mean()) / (values.std() + ADVANTAGE_EPSILON)
    return advantages


def checked_advantages(advantages: Any, size: int) -> np.ndarray:
    """What ``compute_advantages`` returned as float64 [G].

    Raises:
        RewardError: it is not one finite number per rollout.
    """
    values = np.asarray(advantages, np.float64)
    if values.shape != (size,) or not np.isfinite(values).all():
        raise RewardError(
            f"compute_advantages must return one finite number for each of the {size} rollouts, got {advantages!r:.200}"
        )
    return values


def add_reward_metrics(metrics: Metrics, sources: Sequence[SourceRewards], rewards: np.ndarray, *, kept: bool) -> None:
    """Adds ``rewards/*``, ``reward*`` and ``frac_reward_zero_std``; means are over scored rollouts."""
    for source in sources:
        _add_mean_and_std(metrics, f"rewards/{source.name}/mean", f"rewards/{source.name}/group_std", source.values)
    _add_mean_and_std(metrics, "reward", "reward_group_std", rewards)
    scored = rewards[~np.isnan(rewards)]
    metrics.add_rate("reward_kept" if kept else "reward_dropped", float(scored.sum()), len(scored))
    metrics.add("frac_reward_zero_std", not kept)


def _add_mean_and_std(metrics: Metrics, mean_name: str, std_name: str, values: np.ndarray) -> None:
    scored = values[~np.isnan(values)]
    metrics.add_rate(mean_name, float(scored.sum()), len(scored))
    if len(scored):
        metrics.add(std_name, float(scored.std()), weight=len(scored))

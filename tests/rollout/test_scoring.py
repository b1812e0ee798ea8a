"""Calling reward functions, checking what they return, and advantages."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ajgrpo.errors import RewardError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.scoring import (
    RewardFunction,
    Scorer,
    SourceRewards,
    add_reward_metrics,
    checked_advantages,
    has_signal,
    standardized_advantages,
    total_rewards,
    unique_names,
)
from ajgrpo.types import RolloutGroup

NAN = math.nan


def make_group(size: int = 3, rollout_rewards: Sequence[float | None] | None = None) -> RolloutGroup:
    return RolloutGroup(
        prompts=[[{"role": "user", "content": "q"}]] * size,
        reward_kwargs={"answer": ["7"] * size},
        completions=[[{"role": "assistant", "content": str(index)}] for index in range(size)],
        completions_ids=[[index] for index in range(size)],
        completions_sequences=[[] for _ in range(size)],
        tool_call_counts=[0] * size,
        tool_failure_counts=[0] * size,
        model_version=0,
        group_id=0,
        row_index=12,
        env_rewards=[None] * size,
        rollout_rewards=list(rollout_rewards or [None] * size),
    )


def score(functions: list[RewardFunction], group: RolloutGroup | None = None) -> list[SourceRewards]:
    scorer = Scorer(functions)
    try:
        return asyncio.run(scorer.score(group or make_group()))
    finally:
        scorer.close()


class Instance:
    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0 for _ in completions]


class AsyncInstance:
    async def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [2.0 for _ in completions]


def named(value: float, completions: list[Any], **kwargs: Any) -> list[float]:
    return [value for _ in completions]


def test_functions_get_the_group_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def look(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 0.0, 0.0]

    score([look])
    assert seen == {
        "prompts": [[{"role": "user", "content": "q"}]] * 3,
        "completions": [[{"role": "assistant", "content": str(index)}] for index in range(3)],
        "completion_ids": [[0], [1], [2]],
        "answer": ["7", "7", "7"],
    }


def test_all_kinds_of_functions_and_values() -> None:
    async def later(completions: list[Any], **kwargs: Any) -> tuple[Any, ...]:
        await asyncio.sleep(0)
        return (None, np.float32(0.5), 2)

    def wrapped(**kwargs: Any) -> Any:
        return later(**kwargs)

    def flags(**kwargs: Any) -> np.ndarray:
        return np.array([True, False, True])

    functions: list[RewardFunction] = [
        later,
        flags,
        functools.partial(named, 3.0),
        functools.partial(later),
        Instance(),
        AsyncInstance(),
    ]
    sources = score([*functions, wrapped])
    assert [source.name for source in sources] == [
        "later",
        "flags",
        "named",
        "later_2",
        "Instance",
        "AsyncInstance",
        "wrapped",
    ]
    values = [source.values.tolist() for source in sources]
    np.testing.assert_equal(values[0], [NAN, 0.5, 2.0])
    np.testing.assert_equal(values[1:3], [[1.0, 0.0, 1.0], [3.0] * 3])
    np.testing.assert_equal(values[3:], [values[0], [1.0] * 3, [2.0] * 3, values[0]])


def test_functions_of_a_group_run_at_the_same_time() -> None:
    """Each waits for the others: run one after another they would never end (the barriers break instead)."""
    barrier, event = threading.Barrier(2, timeout=10), asyncio.Event()

    def plain(**kwargs: Any) -> list[float]:
        barrier.wait()
        return [0.0] * 3

    async def first(**kwargs: Any) -> list[float]:
        async with asyncio.timeout(10):
            await event.wait()
        return [0.0] * 3

    async def second(**kwargs: Any) -> list[float]:
        event.set()
        return [0.0] * 3

    assert len(score([plain, functools.partial(plain), first, second])) == 4


def test_rewards_of_a_custom_loop_are_a_source() -> None:
    (source,) = score([], make_group(rollout_rewards=[1.0, None, 3.0]))
    assert source.name == "rollout"
    np.testing.assert_equal(source.values, [1.0, NAN, 3.0])
    assert score([], make_group()) == []
    with pytest.raises(RewardError, match="'rollout' returned nan"):
        score([], make_group(rollout_rewards=[NAN, None, 3.0]))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, NAN, 0.0], r"'bad' returned nan \(float\) for completion 1 of row 12; it must return one finite number"),
        ([1.0, 0.0, math.inf], r"returned inf \(float\) for completion 2"),
        (["1.0", 0.0, 0.0], r"returned '1.0' \(str\) for completion 0"),
        ([1j, 0.0, 0.0], r"returned 1j \(complex\)"),
        ([[1.0], 0.0, 0.0], r"returned \[1.0\] \(list\)"),
        ([1.0, 0.0], "returned 2 values for 3 completions"),
        (np.zeros((3, 1)), r"\(ndarray\) for completion 0"),
        (1.0, r"returned 1.0 \(float\)"),
        ("123", r"returned '123' \(str\)"),
        (None, r"returned None \(NoneType\)"),
        ({"a": 1}, r"\(dict\)"),
    ],
)
def test_unusable_values_name_function_value_and_rule(returned: Any, message: str) -> None:
    def bad(**kwargs: Any) -> Any:
        return returned

    with pytest.raises(RewardError, match=message):
        score([bad])


def test_exact_numbers_are_accepted() -> None:
    def exact(**kwargs: Any) -> list[Any]:
        return [Fraction(1, 2), 10**3, -0.0]

    assert score([exact])[0].values.tolist() == [0.5, 1000.0, 0.0]


def test_a_function_that_raises_is_named_and_its_error_kept() -> None:
    def broken(**kwargs: Any) -> list[float]:
        raise KeyError("gone")

    with pytest.raises(RewardError, match="'broken' raised KeyError: 'gone'") as caught:
        score([broken])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_without_kwargs_is_told_about_columns() -> None:
    def strict(prompts: Any, completions: Any, completion_ids: Any) -> list[float]:
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"unexpected keyword argument 'answer'; .* accept \*\*kwargs"):
        score([strict])


def test_names() -> None:
    partial = functools.partial(functools.partial(named, 1.0))
    assert unique_names([named, partial, Instance(), named]) == ["named", "named_2", "Instance", "named_3"]


def test_totals_leave_out_sources_that_do_not_apply() -> None:
    sources = [SourceRewards("a", np.array([1.0, NAN, NAN])), SourceRewards("b", np.array([0.5, 2.0, NAN]))]
    np.testing.assert_equal(total_rewards(sources, 3), [1.5, 2.0, NAN])
    np.testing.assert_equal(total_rewards([], 2), [NAN, NAN])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], True),
        ([1.0, NAN, 0.0], True),
        ([1.0, 1.0], False),
        ([1.0, NAN], False),
        ([NAN, NAN], False),
        ([1.0], False),
    ],
)
def test_signal_needs_two_scored_rollouts_that_differ(rewards: list[float], expected: bool) -> None:
    assert has_signal(np.array(rewards)) is expected


def test_advantages_are_standardized_over_scored_rollouts() -> None:
    rewards = np.array([1.0, 0.0, NAN, 0.0, 1.0, 3.0])
    scored = rewards[[0, 1, 3, 4, 5]]
    expected = np.zeros(6)
    expected[[0, 1, 3, 4, 5]] = (scored - 1.0) / (np.sqrt(1.2) + 1e-6)  # population std: sqrt(6 / 5)
    np.testing.assert_allclose(standardized_advantages(rewards), expected, rtol=1e-12)
    np.testing.assert_array_equal(standardized_advantages(np.array([2.0, 2.0])), [0.0, 0.0])
    np.testing.assert_array_equal(standardized_advantages(np.array([NAN, NAN])), [0.0, 0.0])


def test_rewards_that_differ_by_rounding_give_no_advantage() -> None:
    assert np.abs(standardized_advantages(np.array([0.1 + 0.2, 0.3]))).max() < 1e-9


def test_advantages_of_a_hook_are_checked() -> None:
    np.testing.assert_array_equal(checked_advantages([1, 2], 2), [1.0, 2.0])
    for bad in ([1.0], [[1.0, 2.0]], [1.0, NAN]):
        with pytest.raises(RewardError, match="one finite number for each of the 2 rollouts"):
            checked_advantages(bad, 2)


def test_metrics_count_dropped_groups_but_in_reward_kept() -> None:
    metrics = Metrics()
    kept = [SourceRewards("exact", np.array([1.0, 0.0])), SourceRewards("style", np.array([NAN, 2.0]))]
    add_reward_metrics(metrics, kept, total_rewards(kept, 2), kept=True)
    dropped = [SourceRewards("exact", np.array([1.0, 1.0, NAN]))]
    add_reward_metrics(metrics, dropped, total_rewards(dropped, 3), kept=False)
    add_reward_metrics(metrics, [], np.array([NAN, NAN]), kept=False)
    assert metrics.reduce() == pytest.approx(
        {
            "rewards/exact/mean": 3 / 4,
            "rewards/exact/group_std": (0.5 * 2 + 0 * 2) / 4,
            "rewards/style/mean": 2.0,
            "rewards/style/group_std": 0.0,
            "reward": (1 + 2 + 1 + 1) / 4,
            "reward_group_std": (0.5 * 2 + 0 * 2) / 4,
            "reward_kept": 1.5,
            "reward_dropped": 1.0,
            "frac_reward_zero_std": 2 / 3,
        }
    )

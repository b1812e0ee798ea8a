"""The pool of environments: reset, tools, reward, and whose object is used again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ajgrpo.errors import ConfigError, DatasetError, RewardError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.environments import EnvironmentPool, check_parts, prompt_with, tool_names
from ajgrpo.rollout.threads import UserThreads
from ajgrpo.types import Message
from tests.rollout.agents import AsyncGame, BrokenReward, Counter, multiply

ASK: list[Message] = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hello."}]


def with_pool(factory: Any, body: Callable[[EnvironmentPool], Awaitable[None]]) -> dict[str, float]:
    async def main() -> dict[str, float]:
        threads, metrics = UserThreads(2, "environments"), Metrics()
        await body(EnvironmentPool(factory, threads, metrics))
        threads.close()
        return metrics.reduce()

    return asyncio.run(main())


def test_reset_gets_the_row_and_its_text_ends_the_prompt() -> None:
    async def body(pool: EnvironmentPool) -> None:
        row = {"prompt": ASK, "target": 5, "extra": [1]}
        async with pool.rollout(row, ASK) as rollout:
            assert rollout.prompt == [ASK[0], {"role": "user", "content": "Hello. Count to 5."}]
            assert ASK[1]["content"] == "Hello.", "the row is left as it is"
            assert rollout.environment.row == {"prompt": ASK, "extra": [1]}
            assert [tool.__name__ for tool in rollout.tools] == ["increment"]
            rollout.tools[0](5)
            assert await rollout.reward() == (Counter, 1.0)

    metrics = with_pool(Counter, body)
    assert metrics["env/reset_s"] >= 0 and metrics["env/reward_s"] >= 0


def test_objects_are_used_again_but_not_after_an_error() -> None:
    async def body(pool: EnvironmentPool) -> None:
        seen = []
        for _ in range(2):
            async with pool.rollout({"target": 1}, ASK) as rollout:
                seen.append(rollout.environment)
                async with pool.rollout({"target": 1}, ASK) as other:
                    assert other.environment is not rollout.environment
        assert seen[0] in (seen[1], other.environment)
        with pytest.raises(OSError, match="step"):
            async with pool.rollout({"target": 1}, ASK) as failed:
                raise OSError("step")
        made = Counter.made
        async with pool.rollout({"target": 1}, ASK) as first, pool.rollout({"target": 1}, ASK) as second:
            assert failed.environment not in (first.environment, second.environment)
        assert Counter.made == made + 1

    with_pool(Counter, body)


def test_a_row_picks_its_environment_and_the_column_stays_here() -> None:
    async def body(pool: EnvironmentPool) -> None:
        async with pool.rollout({"environment": "game", "x": 1}, []) as rollout:
            assert rollout.prompt == [{"role": "user", "content": "Reach the goal."}]
            assert [tool.__name__ for tool in rollout.tools] == ["move"]
            assert await rollout.reward() is None
            assert await rollout.tools[0]("up") == "moved up"
            assert await rollout.reward() == (AsyncGame, 1.0)
        async with pool.rollout({"environment": "count", "target": 2}, ASK) as rollout:
            assert rollout.environment.row == {}
        for row in ({"environment": "absent"}, {}):
            with pytest.raises(DatasetError, match="names one of 'game', 'count'"):
                async with pool.rollout(row, []):
                    pass

    with_pool({"game": AsyncGame, "count": Counter}, body)


class BadReset(Counter):
    def reset(self, **kwargs: Any) -> Any:
        return kwargs["text"]


class BadReward(Counter):
    def get_reward(self) -> Any:
        return self.target


def test_what_breaks_the_contract_is_named() -> None:
    async def body(pool: EnvironmentPool) -> None:
        with pytest.raises(ConfigError, match=r"BadReset\.reset\(\) must return text or None, got int"):
            async with pool.rollout({"text": 3}, ASK):
                pass
        with pytest.raises(ConfigError, match="there is no prompt"):
            async with pool.rollout({"text": None}, []):
                pass

    with_pool(BadReset, body)

    async def rewards(pool: EnvironmentPool) -> None:
        for value in (math.nan, math.inf, "1", [1.0]):
            with pytest.raises(RewardError, match=r"BadReward\.get_reward\(\) returned"):
                async with pool.rollout({"target": value}, ASK) as rollout:
                    await rollout.reward()
        async with pool.rollout({"target": True}, ASK) as rollout:
            assert await rollout.reward() == (BadReward, 1.0)

    with_pool(BadReward, rewards)

    async def no_reset(pool: EnvironmentPool) -> None:
        with pytest.raises(ConfigError, match="made a dict, which has no reset"):
            async with pool.rollout({}, ASK):
                pass

    with_pool(dict, no_reset)


def test_the_text_joins_the_last_user_message() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    joined = prompt_with(parts, "!", Counter)
    assert joined[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "!"}]
    assert prompt_with(ASK[:1], "x", Counter) == [ASK[0], {"role": "user", "content": "x"}]
    assert prompt_with(ASK, None, Counter) == ASK == prompt_with(ASK, "", Counter)


class Undocumented(Counter):
    def step(self, x: int) -> int:
        return x


def test_parts_are_checked_before_anything_starts() -> None:
    check_parts([multiply], {"a": Counter, "b": AsyncGame}, has_dataset=True)
    check_parts([multiply], Counter, has_dataset=False)
    assert tool_names(BrokenReward) == ["increment"]
    with pytest.raises(ConfigError, match=r"Undocumented\.step"):
        check_parts([], Undocumented, has_dataset=True)
    with pytest.raises(ConfigError, match="got twice"):
        check_parts([Counter.increment], Counter, has_dataset=True)
    with pytest.raises(ConfigError, match="column 'environment'"):
        check_parts([], {"a": Counter}, has_dataset=False)

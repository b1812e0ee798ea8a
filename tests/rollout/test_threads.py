"""Threads for user code: results, errors, reuse, and calls that never return."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from ajgrpo.errors import RolloutWorkerError
from ajgrpo.rollout import threads as module
from ajgrpo.rollout.threads import UserThreads
from tests.rollout.agents import hang

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


def test_calls_run_in_the_callers_context_and_threads_are_used_again() -> None:
    async def main() -> None:
        threads = UserThreads(2, "t")
        NAME.set("outer")
        assert await threads.run(NAME.get) == "outer"
        first = await threads.run(threading.get_ident)
        assert await threads.run(threading.get_ident) == first
        with pytest.raises(SystemExit):
            await threads.run(exit_call)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.run(iter(()).__next__)
        assert await threads.run(threading.get_ident) == first and threads.num_given_up == 0
        threads.close()

    asyncio.run(main())


def exit_call() -> None:
    raise SystemExit(1)


def test_at_most_size_calls_run() -> None:
    async def main() -> None:
        threads, gate, running = UserThreads(2, "t"), threading.Event(), []

        def call() -> int:
            running.append(1)
            gate.wait(20)
            return len(running)

        calls = [asyncio.create_task(threads.run(call)) for _ in range(5)]
        while len(running) < 2:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(running) == 2
        gate.set()
        assert len(await asyncio.gather(*calls)) == 5
        threads.close()

    asyncio.run(main())


def test_a_call_that_hangs_loses_its_place_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GIVEN_UP", 2)

    async def main() -> None:
        threads = UserThreads(1, "t")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await threads.run(hang)
        assert threads.num_given_up == 1
        assert await threads.run(lambda: 7) == 7
        with pytest.raises(RolloutWorkerError, match=r"2 calls of tools or environments .* never returned"):
            async with asyncio.timeout(0.01):
                await threads.run(hang)
        threads.close()

    asyncio.run(main())

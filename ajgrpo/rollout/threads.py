"""Threads for user code that may never return.

    await threads.run(call) ──▶ idle thread, or a new one ──▶ result
            └─ cancelled (a time limit) ──▶ the thread is given up: its place is free at once, and it ends with its call

An executor of the standard library has no such end: a call that hangs keeps its place for ever, and the process waits
for it at exit. Python cannot stop a thread, so a given-up one lives on until its call returns; their number is bounded.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ajgrpo.errors import RolloutWorkerError

T = TypeVar("T")

MAX_GIVEN_UP = 1000
"""Threads stuck in user code at which the run ends: each holds memory, and more would only follow."""


class UserThreads:
    """Runs blocking calls for the event loop, at most ``size`` at a time.

    Invariant: a thread is idle, busy with a call that is waited for, or given up; the busy ones never exceed ``size``.

    Args:
        size: most calls at the same time, given-up ones left out.
        name: prefix of the threads' names.
    """

    def __init__(self, size: int, name: str):
        self._name = name
        self._free = asyncio.Semaphore(size)
        self._idle: list[_UserThread] = []
        self._given_up: set[_UserThread] = set()

    @property
    def num_given_up(self) -> int:
        """Threads whose call is no longer waited for, and has not returned."""
        self._given_up = {thread for thread in self._given_up if thread.is_alive()}
        return len(self._given_up)

    async def run(self, call: Callable[[], T]) -> T:
        """Runs ``call`` in a thread, in the caller's context; whatever it raises is raised here.

        Raises:
            RolloutWorkerError: too many earlier calls never returned.
        """
        async with self._free:
            thread = self._idle.pop() if self._idle else _UserThread(self._name)
            future = thread.submit(contextvars.copy_context(), call)
            try:
                return await future
            finally:
                if future.done() and not future.cancelled():
                    self._idle.append(thread)
                else:
                    self._give_up(thread)

    def close(self) -> None:
        """Ends the idle threads. The others are daemons and end with the process."""
        for thread in self._idle:
            thread.end()
        self._idle.clear()

    def _give_up(self, thread: _UserThread) -> None:
        thread.end()
        self._given_up.add(thread)
        if (stuck := self.num_given_up) >= MAX_GIVEN_UP:
            raise RolloutWorkerError(
                f"{stuck} calls of tools or environments ran into rollout_timeout and never returned; give them time "
                "limits of their own"
            )


class _UserThread(threading.Thread):
    """One thread: takes calls from its queue until it gets None."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def submit(self, context: contextvars.Context, call: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(error: BaseException | None, value: Any) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        def work() -> None:
            error, value = None, None
            try:
                value = context.run(call)
            except BaseException as exc:  # also SystemExit: the thread must live on, and the caller must hear of it
                error = exc if not isinstance(exc, StopIteration) else RuntimeError("the call raised StopIteration")
            try:
                loop.call_soon_threadsafe(settle, error, value)
            except RuntimeError:
                return  # the event loop has ended, so nobody waits

        self._calls.put(work)
        return future

    def end(self) -> None:
        self._calls.put(None)

    def run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()

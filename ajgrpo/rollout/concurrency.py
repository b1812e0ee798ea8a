"""How much may run at the same time: tokens ahead of the trainer, and rollouts in flight.

Both are plain bookkeeping without waiting; the loop's dispatch task asks them and waits (``loop.py``).

Left out: a cap that follows the server's load (``/metrics``); it will set ``RolloutSlots.cap``.
"""

from __future__ import annotations

from collections import deque

LENGTH_WINDOW = 64
"""Finished groups over which the expected length of a group is averaged."""


class TokenPacer:
    """Bounds staleness by the tokens that are queued or in flight.

    Invariant: ``held`` is what has been queued and not yet taken, plus the expected tokens of every group in flight. A
    group may start when nothing is held, or when ``held`` and its own expected tokens fit the allowance. Until the
    first group has finished, its length is unknown and groups start one at a time.
    """

    def __init__(self) -> None:
        self._queued_tokens = 0
        self._groups_in_flight = 0
        self._lengths: deque[int] = deque(maxlen=LENGTH_WINDOW)

    @property
    def expected_group_tokens(self) -> float | None:
        """Mean tokens of the last finished groups; None before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def held(self, taken_tokens: int) -> float:
        """Tokens queued or expected from groups in flight, given how many the trainer has taken so far."""
        return self._queued_tokens - taken_tokens + self._groups_in_flight * (self.expected_group_tokens or 0.0)

    def may_start(self, allowance: int, taken_tokens: int) -> bool:
        """Whether another group may start."""
        expected, held = self.expected_group_tokens, self.held(taken_tokens)
        if expected is None:
            return self._groups_in_flight == 0
        return (self._groups_in_flight == 0 and held <= 0) or held + expected <= allowance

    def start_group(self) -> None:
        """A group starts."""
        self._groups_in_flight += 1

    def finish_group(self, tokens: int, queued_tokens: int) -> None:
        """A group has been scored: its samples have ``tokens`` tokens, of which ``queued_tokens`` were queued."""
        self._groups_in_flight -= 1
        self._lengths.append(tokens)
        self._queued_tokens += queued_tokens

    def abandon_group(self) -> None:
        """A group ended without samples and without telling anything about length."""
        self._groups_in_flight -= 1


class RolloutSlots:
    """Bounds the rollouts in flight.

    Invariant: ``in_flight`` counts the rollouts between ``acquire`` and ``release``. Lowering ``cap`` below it ends
    none of them; new ones wait.

    Args:
        cap: most rollouts in flight, at least 1.
    """

    def __init__(self, cap: int):
        self.cap = cap
        self.in_flight = 0

    @property
    def available(self) -> bool:
        """Whether ``acquire`` is allowed."""
        return self.in_flight < self.cap

    def acquire(self) -> None:
        """Takes a slot, which must be available."""
        assert self.available, f"{self.in_flight} rollouts in flight, cap {self.cap}"
        self.in_flight += 1

    def release(self) -> None:
        """Gives a slot back."""
        self.in_flight -= 1

"""How much may run at the same time: tokens ahead of the trainer, and rollouts in flight.

Both are plain bookkeeping without waiting; the loop's dispatch task asks them and waits (``loop.py``).

The cap on rollouts follows the server's load: ``LoadCap`` reads it and says what ``RolloutSlots.cap`` should be.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

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
        self.published_samples = 0

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

    def finish_group(self, tokens: int, queued_tokens: int, queued_samples: int = 0) -> None:
        """A group has been scored: its samples have ``tokens`` tokens, of which ``queued_tokens`` were queued."""
        self.published_samples += queued_samples
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


@dataclasses.dataclass(frozen=True)
class ServerLoad:
    """What the server says about its load, over all its engines.

    Attributes:
        cache_usage: share of the KV cache in use, 0 to 1; the fullest engine's.
        running: requests that are decoded.
        waiting: requests that are accepted and not yet scheduled.
        preemptions: since the server started.
        cache_tokens: tokens that the KV cache holds; None if not told.
    """

    cache_usage: float
    running: float
    waiting: float
    preemptions: float
    cache_tokens: float | None

    @classmethod
    def read(cls, values: Mapping[str, float]) -> ServerLoad | None:
        """The load out of ``inference.client.parse_metrics``; None when the gauges are not there."""
        usage, waiting = values.get("vllm:kv_cache_usage_perc"), values.get("vllm:num_requests_waiting")
        if usage is None or waiting is None:
            return None
        info = "vllm:cache_config_info"
        blocks, size = values.get(f"{info}/num_gpu_blocks"), values.get(f"{info}/block_size")
        # Both labels are sums over the engines, and the metric itself, always 1, counts them.
        tokens = blocks * size / values[info] if blocks and size and values.get(info) else None
        running, preemptions = (
            values.get("vllm:num_requests_running", 0.0),
            values.get("vllm:num_preemptions_total", 0.0),
        )
        return cls(usage, running, waiting, preemptions, tokens)


LOW_USAGE, HIGH_USAGE = 0.6, 0.8
RAISE, LOWER = 1.25, 0.7


class LoadCap:
    """The cap on rollouts in flight, by the server's load.

    It starts at the number of requests of full length that the KV cache holds. It grows by a quarter while less than
    60 % of the cache is used and nothing waits, at most once for every cap-many finished rollouts; it shrinks by 30 %
    above 80 %. It stays within 1 and ``most``.

    Args:
        most: ``max_concurrent_rollouts``.
        max_model_len: tokens of a request of full length.
    """

    def __init__(self, most: int, max_model_len: int):
        self._most, self._max_model_len = most, max_model_len
        self._cap: int | None = None
        self._finished_at_raise = 0

    def update(self, load: ServerLoad, finished: int) -> int:
        """The cap after another look.

        Args:
            load: what the server says.
            finished: rollouts finished so far.
        """
        if self._cap is None:
            full = self._most if load.cache_tokens is None else int(load.cache_tokens // self._max_model_len)
            self._cap = min(max(full, 1), self._most)
            self._finished_at_raise = finished
        elif load.cache_usage > HIGH_USAGE:
            self._cap = max(int(self._cap * LOWER), 1)
        elif load.cache_usage < LOW_USAGE and not load.waiting and finished - self._finished_at_raise >= self._cap:
            self._cap = min(max(int(self._cap * RAISE), self._cap + 1), self._most)
            self._finished_at_raise = finished
        return self._cap

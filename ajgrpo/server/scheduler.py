"""Which request holds which slot, and what goes into one prefill row. Plain Python and NumPy, no device.

    submit ──▶ waiting ──admit──▶ running[slot] ──last token──▶ done
                  ▲                   │
                  └──── preempt_all ──┘   (pause, new weights: the cache is dropped, the tokens are kept)

Invariant: a sequence is in ``waiting`` or in exactly one slot; a slot's cache holds all of its sequence's tokens but
the last. First come, first served; a preempted sequence goes back to the front.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from ajgrpo.inference.protocol import GenerateResponse, SamplingParams, WeightSpan


@dataclasses.dataclass(eq=False)
class Generation:
    """One request on its way: ``prompt`` and ``params`` as asked for (already validated), and what was drawn so far.

    ``max_tokens`` is clipped to the context. ``top`` holds (ids, log-probs) of the most likely tokens of each step,
    ``candidates`` the support of each step under truncation. ``future`` gets the generation itself when it is done, so
    that the reply is put together outside the engine's thread.
    """

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    future: Future[Generation] = dataclasses.field(default_factory=Future)
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    candidates: list[list[int]] = dataclasses.field(default_factory=list)
    spans: list[WeightSpan] = dataclasses.field(default_factory=list)
    slot: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        p = self.params
        return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.tokens)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` once the last token is drawn."""
        if self.tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def mark_version(self, version: str) -> None:
        """Notes that the newest token was drawn under the weights ``version``."""
        end = len(self.tokens)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = dataclasses.replace(self.spans[-1], end=end)
        else:
            self.spans.append(WeightSpan(version, end - 1, end))

    def response(self) -> GenerateResponse:
        """The reply. ``logprobs`` entries per token: the drawn token first, then the likeliest others."""
        top = None
        if self.params.logprobs is not None:
            top = [self._top_entries(i, self.params.logprobs) for i in range(len(self.tokens))]
        return GenerateResponse(
            token_ids=self.tokens,
            finish_reason=self.finish_reason or "length",
            log_probs=None if top is None else self.log_probs,
            top_log_probs=top,
            weight_spans=tuple(self.spans),
            sampling_mask=self.candidates if self.truncates else None,
        )

    def _top_entries(self, step: int, count: int) -> dict[int, float]:
        if not count:
            return {}
        ids, log_probs = self.top[step]
        entries = {self.tokens[step]: self.log_probs[step]}
        for token, log_prob in zip(ids.tolist(), log_probs.tolist(), strict=True):
            if len(entries) >= count:
                break
            entries.setdefault(token, log_prob)
        return entries


class Scheduler:
    """Hands out ``num_slots`` slots."""

    def __init__(self, num_slots: int):
        self.waiting: collections.deque[Generation] = collections.deque()
        self.running: dict[int, Generation] = {}
        self._free = list(range(num_slots))[::-1]

    @property
    def live_tokens(self) -> int:
        """Tokens of all running sequences."""
        return sum(generation.length for generation in self.running.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest running sequence."""
        return max((generation.length for generation in self.running.values()), default=0)

    def submit(self, generation: Generation) -> None:
        """Queues a request."""
        self.waiting.append(generation)

    def admit(self) -> list[Generation]:
        """Gives free slots to waiting requests; returns those that got one, whose cache must now be filled."""
        admitted = []
        while self.waiting and self._free:
            generation = self.waiting.popleft()
            generation.slot = self._free.pop()
            self.running[generation.slot] = generation
            admitted.append(generation)
        return admitted

    def release(self, generation: Generation) -> None:
        """Forgets a finished or abandoned request, wherever it is."""
        if generation.slot is None:
            if generation in self.waiting:
                self.waiting.remove(generation)
            return
        del self.running[generation.slot]
        self._free.append(generation.slot)
        generation.slot = None

    def preempt_all(self) -> int:
        """Sends every running request back to the front of the queue, tokens kept; returns how many there were."""
        preempted = list(self.running.values())
        for generation in preempted:
            self.release(generation)
        self.waiting.extendleft(reversed(preempted))
        return len(preempted)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A token sequence to forward once, and the slots that get its keys and values."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]


def segments(admitted: Iterable[Generation]) -> list[Segment]:
    """What must be forwarded for the admitted requests: all tokens but the last, equal sequences only once."""
    slots: dict[tuple[int, ...], list[int]] = {}
    for generation in admitted:
        assert generation.slot is not None
        tokens = (*generation.prompt, *generation.tokens)[:-1]
        if tokens:
            slots.setdefault(tokens, []).append(generation.slot)
    return [Segment(tokens, tuple(where)) for tokens, where in slots.items()]


def pack_rows(items: Sequence[Segment], row_tokens: int) -> Iterator[list[Segment]]:
    """Groups segments, in order, into rows of at most ``row_tokens`` tokens; a longer segment gets its own row."""
    row: list[Segment] = []
    used = 0
    for segment in items:
        if row and used + len(segment.tokens) > row_tokens:
            yield row
            row, used = [], 0
        row.append(segment)
        used += len(segment.tokens)
    if row:
        yield row


def round_up(length: int, smallest: int, largest: int) -> int:
    """The smallest of ``smallest`` · 2ⁿ that holds ``length``, but never more than ``largest``."""
    size = smallest
    while size < length:
        size *= 2
    return min(size, largest)

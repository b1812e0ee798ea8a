"""What the engine's device programs take: the arrays, and the few sizes for which they are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ajgrpo.server.kernels import PrefillRow, StepInputs
from ajgrpo.server.sampling import Controls
from ajgrpo.server.scheduler import Generation, Segment

TOP_STEP = 8
CANDIDATE_SIZES = (64, 512, 4096)


class Lanes:
    """The decode step's inputs on the host, one entry for each slot. A free slot is greedy at position 0."""

    def __init__(self, num_slots: int):
        self._tokens, self._positions, self._index, self._top_k = np.zeros((4, num_slots), np.int32)
        self._temperature, self._top_p, self._min_p = np.zeros((3, num_slots), np.float32)
        self._seeds = np.zeros((num_slots, 2), np.uint32)
        self._active = np.zeros(num_slots, np.int32)

    def fill(self, generation: Generation) -> None:
        """Puts a request, new or interrupted, into its slot."""
        slot, params = generation.slot, generation.params
        assert slot is not None and params.seed is not None
        self._tokens[slot], self._positions[slot] = generation.last_token, generation.length - 1
        self._index[slot], self._active[slot] = len(generation.tokens), 1
        self._temperature[slot], self._top_p[slot], self._min_p[slot] = params.temperature, params.top_p, params.min_p
        self._top_k[slot] = max(params.top_k, 0)
        self._seeds[slot] = (params.seed >> 32) & 0xFFFFFFFF, params.seed & 0xFFFFFFFF

    def clear(self, slot: int | slice) -> None:
        """Frees a slot."""
        for array in (self._tokens, self._positions, self._index, self._top_k, self._temperature, self._active):
            array[slot] = 0

    def advance(self, tokens: np.ndarray) -> None:
        """The drawn tokens [S] are the next step's inputs."""
        np.copyto(self._tokens, tokens, where=self._active > 0)
        self._positions += self._active
        self._index += self._active

    def inputs(self) -> StepInputs:
        """The arrays as the kernel takes them; they change again only after the step's results were read."""
        controls = Controls(self._temperature, self._top_p, self._min_p, self._top_k, self._seeds, self._index)
        return StepInputs(self._tokens, self._positions, controls)


def prefill_row(row: Sequence[Segment], size: int, num_slots: int) -> PrefillRow:
    """The arrays of one prefill row, padded to ``size``."""
    tokens, positions = np.zeros((2, size), np.int32)
    ends, slots = np.arange(1, size + 1, dtype=np.int32), np.full(size, num_slots, np.int32)
    start = 0
    for segment in row:
        end = start + len(segment.tokens)
        tokens[start:end], positions[start:end] = segment.tokens, np.arange(end - start)
        ends[start:end], slots[start:end] = end, segment.slots[0]
        start = end
    return PrefillRow(tokens, positions, ends, slots)


def num_top(running: Iterable[Generation], vocab_size: int) -> int:
    """How many top log-probs the step computes: few distinct values, each of which is a compilation."""
    wanted = max((generation.params.logprobs or 0 for generation in running), default=0)
    return 1 if wanted <= 1 else min(-(-wanted // TOP_STEP) * TOP_STEP, vocab_size)


def num_candidates(running: Iterable[Generation], vocab_size: int) -> int:
    """How many of the likeliest tokens the step considers for truncation; 0 when no request truncates."""
    wanted = max((g.params.top_k if g.params.top_k > 0 else vocab_size for g in running if g.truncates), default=0)
    return 0 if not wanted else min(next((size for size in CANDIDATE_SIZES if size >= wanted), vocab_size), vocab_size)

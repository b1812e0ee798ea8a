"""Assigns samples to the rows of a micro-batch, one row per data-parallel rank.

A rank that waits for the others in the gradient reduction is idle, so a micro-batch takes as long as its most
expensive row. The planner therefore keeps a group together, where its prompt is already held, and lets any other
sample into a row only where that costs the micro-batch no time.

Left out: moving samples between rows once placed (but see `MicroBatchPlanner.finish`), and looking ahead.
"""

from __future__ import annotations

import enum

import numpy as np

from ajgrpo.packing.trie import Growth, PrefixTrie
from ajgrpo.types import RolloutSample

PAIRS_PER_TOKEN = 6 * 1024
"""Cost of a token outside attention, in visible (query, key) pairs.

For a transformer layer of width H a visible pair takes 4H FLOPs forward (2H for its score, 2H for its share of the
output), and a token takes 2 FLOPs for each of the layer's about 12H² weights: 24H² / 4H = 6H pairs. H = 1024 stands
for small models; a larger one shifts weight from pairs to tokens, by which rows seldom rank differently.
"""


class Placement(enum.Enum):
    """What became of a sample that was offered to a planner."""

    PLACED = "placed"
    """It is in one of the rows."""
    OVERSIZE = "oversize"
    """It is longer than the token budget and fits no row of any micro-batch: drop it."""
    FULL = "full"
    """The micro-batch is complete, every row non-empty: offer the sample to the next planner."""


class Row:
    """The samples of one rank.

    Attributes:
        token_budget: largest number of unique tokens, and of loss terms.
        samples: in the order of placing.
        groups: group ids of the samples.
        num_terms: loss terms of all samples; shared tokens count once for each sample that trains them.
        trie: the samples' prefix trie.
    """

    def __init__(self, token_budget: int):
        self.token_budget = token_budget
        self.samples: list[RolloutSample] = []
        self.groups: set[int] = set()
        self.num_terms = 0
        self.trie = PrefixTrie()

    @property
    def num_tokens(self) -> int:
        """Unique tokens: what the rank forwards."""
        return self.trie.num_tokens

    @property
    def cost(self) -> int:
        """Attention cost in (query, key) pairs: visible pairs + `PAIRS_PER_TOKEN` for each unique token."""
        return _cost(Growth(self.trie.num_tokens, self.trie.visible_pairs))

    def cost_with(self, sample: RolloutSample) -> int | None:
        """The cost after adding ``sample``; None if it does not fit. Changes nothing."""
        if self.num_terms + sample.num_trained > self.token_budget:
            return None
        growth = self.trie.measure(sample.input_ids)
        return self.cost + _cost(growth) if self.num_tokens + growth.tokens <= self.token_budget else None

    def add(self, sample: RolloutSample) -> None:
        """Adds a sample that fits."""
        self.trie.add(sample.input_ids)
        self.samples.append(sample)
        self.groups.add(sample.group_id)
        self.num_terms += sample.num_trained


class MicroBatchPlanner:
    """Fills one micro-batch; take a new planner for the next one.

    Invariants: no row exceeds ``token_budget`` unique tokens or loss terms; every placed sample is in exactly one row;
    when `add` answers FULL, no row is empty.

    Args:
        num_rows: number of data-parallel ranks, at least 1.
        token_budget: largest number of unique tokens, and of loss terms, of a row; at least 1.
    """

    def __init__(self, num_rows: int, token_budget: int):
        if num_rows < 1 or token_budget < 1:
            raise ValueError(f"num_rows and token_budget must be at least 1, got {num_rows} and {token_budget}")
        self.token_budget = token_budget
        self.rows = [Row(token_budget) for _ in range(num_rows)]

    @property
    def every_row_filled(self) -> bool:
        """Whether each rank has something to do."""
        return all(row.samples for row in self.rows)

    def add(self, sample: RolloutSample) -> Placement:
        """Places a sample in the least-loaded row that may take it.

        These are the rows that hold its group and in which it fits. If there is none: the empty rows, so that no rank
        stays without work; and with no row empty, those in which it fits without exceeding the cost of the most
        expensive row. A single rank keeps no other waiting, so its row takes whatever fits.

        Raises:
            ValueError: the sample has no token, or trained positions that do not ascend within its predicted tokens.
        """
        _check(sample)
        if sample.num_tokens > self.token_budget:
            return Placement.OVERSIZE
        costs = [(row, cost) for row in self.rows if (cost := row.cost_with(sample)) is not None]
        takers = [row for row, _ in costs if sample.group_id in row.groups]
        if not takers and not self.every_row_filled:
            takers = [row for row in self.rows if not row.samples]
        elif not takers:
            ceiling = max(row.cost for row in self.rows)
            takers = [row for row, cost in costs if cost <= ceiling or len(self.rows) == 1]
        if not takers:
            return Placement.FULL
        min(takers, key=lambda row: row.cost).add(sample)
        return Placement.PLACED

    def finish(self) -> list[Row]:
        """Closes the last, partial micro-batch: splits rows until none is empty, and returns them.

        A row stays empty only when there are fewer samples than rows. Splitting repeats the shared prefix in both
        halves, which costs less than an idle rank.
        """
        for i, empty in enumerate(self.rows):
            donors = [row for row in self.rows if len(row.samples) > 1]
            if empty.samples or not donors:
                continue
            donor = max(donors, key=lambda row: row.cost)
            self.rows[self.rows.index(donor)], self.rows[i] = _split(donor)
        return self.rows


def _split(row: Row) -> tuple[Row, Row]:
    """Two non-empty rows of about the same cost, each a stretch of the depth-first order, so that both still share."""
    ordered = [row.samples[i] for i in row.trie.depth_first()]
    left, right = Row(row.token_budget), Row(row.token_budget)
    for sample in ordered[:-1]:
        (left if 2 * left.cost < row.cost else right).add(sample)
    right.add(ordered[-1])
    return left, right


def _cost(growth: Growth) -> int:
    return growth.visible_pairs + PAIRS_PER_TOKEN * growth.tokens


def _check(sample: RolloutSample) -> None:
    bounded = np.concatenate([[0], sample.trained_positions, [sample.num_tokens]])
    if (np.diff(bounded) <= 0).any():
        raise ValueError(
            f"trained positions must ascend within 1..{sample.num_tokens - 1}, got {sample.trained_positions.tolist()} "
            f"(rollout {sample.rollout_id!r})"
        )

"""The planner's rules, one by one and on random streams."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ajgrpo.packing.planner import PAIRS_PER_TOKEN, MicroBatchPlanner, Placement, Row
from ajgrpo.types import RolloutSample
from tests.helpers import make_sample, random_samples

PLACED, OVERSIZE, FULL = Placement.PLACED, Placement.OVERSIZE, Placement.FULL


def chain(start: int, length: int, group_id: int, num_terms: int = 1) -> RolloutSample:
    """A sample that shares nothing with one of another ``start``."""
    trained = range(length - num_terms, length)
    return make_sample([start] * length, trained, group_id=group_id, rollout_id=f"{start}/{length}/{group_id}")


def layout_of(planner: MicroBatchPlanner) -> list[list[str]]:
    return [[sample.rollout_id for sample in row.samples] for row in planner.rows]


def placements(planner: MicroBatchPlanner, *samples: RolloutSample) -> list[Placement]:
    return [planner.add(sample) for sample in samples]


def test_cost_is_visible_pairs_and_a_share_for_each_token() -> None:
    row = Row(token_budget=100)
    first, second = make_sample([5, 6, 7, 8]), make_sample([5, 6, 9])
    row.add(first)
    assert row.cost == (1 + 2 + 3 + 4) + 4 * PAIRS_PER_TOKEN
    foretold = row.cost_with(second)
    row.add(second)
    assert foretold == row.cost == (1 + 2 + 3 + 4) + (2 + 3) + 6 * PAIRS_PER_TOKEN
    assert (row.num_tokens, row.num_terms, row.groups) == (6, 5, {0})


def test_group_stays_together() -> None:
    planner = MicroBatchPlanner(2, token_budget=100)
    a, b, c = chain(1, 10, 0), chain(2, 4, 1), chain(3, 20, 0)
    assert placements(planner, a, b, c) == [PLACED] * 3
    # Row 1 is cheaper, but row 0 holds the group.
    assert [row.samples for row in planner.rows] == [[a, c], [b]]


def test_group_in_two_rows_goes_to_the_cheaper_one() -> None:
    planner = MicroBatchPlanner(2, token_budget=20)
    samples = [chain(1, 15, 0), chain(2, 8, 0), chain(3, 5, 0)]
    assert placements(planner, *samples) == [PLACED] * 3
    assert layout_of(planner) == [["1/15/0"], ["2/8/0", "3/5/0"]]


def test_full_row_of_the_group_is_passed_over_for_a_costlier_one() -> None:
    planner = MicroBatchPlanner(2, token_budget=20)
    samples = [chain(1, 15, 0), chain(2, 8, 0, num_terms=7), chain(2, 8, 0, num_terms=7)]
    assert placements(planner, *samples) == [PLACED] * 3
    assert [(row.num_tokens, row.num_terms) for row in planner.rows] == [(15, 1), (9, 14)]
    # Row 1 is cheaper, but has no loss terms left.
    assert planner.add(chain(1, 15, 0, num_terms=7)) is PLACED
    assert [(row.num_tokens, row.num_terms) for row in planner.rows] == [(16, 8), (9, 14)]


def test_other_group_fills_an_empty_row_first() -> None:
    planner = MicroBatchPlanner(3, token_budget=100)
    assert not planner.every_row_filled
    assert placements(planner, chain(1, 50, 0), chain(2, 1, 1, 0), chain(3, 90, 2)) == [PLACED] * 3
    assert layout_of(planner) == [["1/50/0"], ["2/1/1"], ["3/90/2"]]
    assert planner.every_row_filled


def test_other_group_must_not_raise_the_maximum() -> None:
    planner = MicroBatchPlanner(2, token_budget=100)
    assert placements(planner, chain(1, 20, 0), chain(2, 10, 1)) == [PLACED] * 2
    assert planner.add(chain(3, 11, 2)) is FULL
    # 10 + 10 tokens in two samples cost fewer pairs than 20 in one.
    assert planner.add(chain(3, 10, 2)) is PLACED
    assert layout_of(planner) == [["1/20/0"], ["2/10/1", "3/10/2"]]
    # Its own group may raise the maximum.
    assert planner.add(chain(4, 50, 2)) is PLACED
    assert [row.num_tokens for row in planner.rows] == [20, 70]


def test_equal_cost_does_not_raise_the_maximum() -> None:
    planner = MicroBatchPlanner(2, token_budget=100)
    shared = [make_sample([1, 2, 3, 4], group_id=0), make_sample([1, 2, 3, 5], group_id=0)]
    assert placements(planner, *shared, make_sample([1, 2, 3, 4], group_id=1)) == [PLACED] * 3
    assert planner.add(make_sample([1, 2, 3, 5], group_id=2)) is PLACED
    assert planner.rows[0].cost == planner.rows[1].cost


def test_common_prefix_across_groups_counts_once() -> None:
    planner = MicroBatchPlanner(1, token_budget=13)
    samples = [make_sample([*range(10), token], [10], group_id=token) for token in (50, 51, 52)]
    # The tenth token predicts the eleventh: 9 are shared and each sample adds 2.
    assert placements(planner, *samples) == [PLACED, PLACED, FULL]
    assert planner.rows[0].num_tokens == 13


def test_single_rank_takes_whatever_fits() -> None:
    planner = MicroBatchPlanner(1, token_budget=10)
    assert placements(planner, chain(1, 4, 0), chain(2, 6, 1), chain(3, 1, 2, 0)) == [PLACED, PLACED, FULL]


def test_token_budget_bounds_unique_tokens() -> None:
    planner = MicroBatchPlanner(1, token_budget=12)
    # The ninth token predicts the tenth: 8 are shared and each sample adds 2.
    outcome = placements(planner, *(make_sample([*range(9), token], [9]) for token in (11, 12, 13)))
    assert outcome == [PLACED, PLACED, FULL]
    assert planner.rows[0].num_tokens == 12


def test_token_budget_bounds_loss_terms() -> None:
    planner = MicroBatchPlanner(1, token_budget=12)
    repeated = make_sample([1] * 6)
    assert placements(planner, repeated, repeated, repeated) == [PLACED, PLACED, FULL]
    assert (planner.rows[0].num_tokens, planner.rows[0].num_terms) == (7, 10)


def test_oversize_by_its_own_length() -> None:
    planner = MicroBatchPlanner(1, token_budget=8)
    assert placements(planner, chain(1, 8, 0), chain(1, 9, 0)) == [PLACED, OVERSIZE]
    assert planner.rows[0].num_tokens == 8


def test_empty_rows_are_filled_before_the_micro_batch_closes() -> None:
    planner = MicroBatchPlanner(2, token_budget=10)
    outcome = placements(planner, *(chain(token, 10, 0) for token in (1, 2, 3)))
    assert outcome == [PLACED, PLACED, FULL]
    assert planner.every_row_filled


def test_finish_spreads_one_group_over_the_ranks() -> None:
    planner = MicroBatchPlanner(4, token_budget=100)
    samples = [make_sample([1, 2, 3, token], [3], rollout_id=str(token)) for token in range(10, 14)]
    placements(planner, *samples)
    assert [len(row.samples) for row in planner.rows] == [4, 0, 0, 0]
    rows = planner.finish()
    assert sorted(row.samples[0].rollout_id for row in rows) == ["10", "11", "12", "13"]
    assert [row.num_tokens for row in rows] == [4] * 4
    assert rows is planner.rows


def test_finish_halves_the_costliest_row_by_cost() -> None:
    planner = MicroBatchPlanner(3, token_budget=100)
    cheap = [chain(token, 5, 0) for token in (1, 2)]
    costly = [chain(token, length, 1) for token, length in ((3, 8), (4, 7), (5, 9), (6, 8))]
    placements(planner, *cheap, *costly)
    planner.finish()
    assert [row.num_tokens for row in planner.rows] == [10, 15 + 9, 8]


def test_finish_leaves_a_row_empty_only_without_samples() -> None:
    planner = MicroBatchPlanner(3, token_budget=100)
    placements(planner, chain(1, 8, 0), chain(2, 8, 0))
    assert [len(row.samples) for row in planner.finish()] == [1, 1, 0]
    assert not planner.every_row_filled
    assert [len(row.samples) for row in MicroBatchPlanner(2, 4).finish()] == [0, 0]


@pytest.mark.parametrize("positions", [[0], [1, 4], [2, 1], [1, 1]])
def test_trained_positions_must_ascend_and_be_predicted(positions: list[int]) -> None:
    sample = make_sample([1, 2, 3, 4], positions, rollout_id="r7")
    with pytest.raises(ValueError, match=r"ascend within 1\.\.3.*r7"):
        MicroBatchPlanner(1, 8).add(sample)


def test_sizes_must_be_positive() -> None:
    for num_rows, token_budget in ((0, 8), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            MicroBatchPlanner(num_rows, token_budget)


def allowed_rows(planner: MicroBatchPlanner, sample: RolloutSample) -> list[int]:
    """The rule restated from scratch: each row is rebuilt with the sample to see what it would cost."""
    cost, fits = {}, {}
    for i, row in enumerate(planner.rows):
        trial = Row(planner.token_budget)
        for member in [*row.samples, sample]:
            trial.add(member)
        cost[i], fits[i] = trial.cost, max(trial.num_tokens, trial.num_terms) <= planner.token_budget
    everywhere = [i for i, fit in fits.items() if fit]
    rows = [i for i in everywhere if sample.group_id in {s.group_id for s in planner.rows[i].samples}]
    if not rows:
        rows = [i for i in everywhere if not planner.rows[i].samples]
    if not rows:
        rows = [i for i in everywhere if len(fits) == 1 or cost[i] <= max(row.cost for row in planner.rows)]
    least = min((planner.rows[i].cost for i in rows), default=0)
    return [i for i in rows if planner.rows[i].cost == least]


@pytest.mark.parametrize("seed", range(30))
def test_random_streams(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, token_budget = int(rng.integers(1, 5)), int(rng.integers(16, 60))
    samples = random_samples(rng, num_groups=10, group_size=6, vocab_size=12, max_completion=24)
    planners = [MicroBatchPlanner(num_rows, token_budget)]
    oversize = []
    for sample in samples:
        outcome = None
        while outcome in (None, FULL):
            expected = allowed_rows(planners[-1], sample)
            sizes = [len(row.samples) for row in planners[-1].rows]
            outcome = planners[-1].add(sample)
            grown = [i for i, row in enumerate(planners[-1].rows) if len(row.samples) != sizes[i]]
            if sample.num_tokens > token_budget:
                assert (outcome, grown) == (OVERSIZE, [])
                oversize.append(sample.rollout_id)
            elif outcome is FULL:
                assert (expected, grown) == ([], [])
                assert planners[-1].every_row_filled
                planners.append(MicroBatchPlanner(num_rows, token_budget))
            else:
                assert grown == expected[:1]
    planners[-1].finish()
    rows = [row for planner in planners for row in planner.rows]
    for row in rows:
        assert max(row.num_tokens, row.num_terms) <= token_budget
        assert row.num_terms == sum(sample.num_trained for sample in row.samples)
        assert row.groups == {sample.group_id for sample in row.samples}
    for planner in planners:
        held = sum(len(row.samples) for row in planner.rows)
        assert sum(bool(row.samples) for row in planner.rows) == min(num_rows, held)
    placed = [sample.rollout_id for row in rows for sample in row.samples]
    assert Counter(placed + oversize) == Counter(sample.rollout_id for sample in samples)

"""Fixed-shape batches: every loss term keeps its history, target and numbers; padding changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ajgrpo.metrics import Metrics
from ajgrpo.packing.batch import (
    TreeBatch,
    batch_metrics,
    bucket_sizes,
    build_batch,
    choose_bucket,
)
from ajgrpo.packing.planner import PAIRS_PER_TOKEN, MicroBatchPlanner, Placement, Row
from ajgrpo.types import RolloutSample
from tests.helpers import make_sample, random_samples

PER_POSITION = ("tokens", "positions", "subtree_end")
PER_TERM = (
    "term_index",
    "targets",
    "old_log_probs",
    "advantages",
    "term_mask",
    "term_sample",
    "term_versions",
    "sampler_ids",
    "sampler_log_probs",
    "candidate_ids",
)


def row_of(*samples: RolloutSample, token_budget: int = 1000) -> Row:
    row = Row(token_budget)
    for sample in samples:
        row.add(sample)
    return row


def build(*rows: Row, size: int = 64, num_sampler_logprobs: int = 3, pad_token_id: int = 0) -> TreeBatch:
    return build_batch(
        rows, size, num_sampler_logprobs=num_sampler_logprobs, num_candidates=0, pad_token_id=pad_token_id
    )


def random_rows(seed: int, share: bool = True) -> list[Row]:
    """The rows of the first micro-batch of a random stream on two ranks."""
    samples = random_samples(np.random.default_rng(seed), vocab_size=16, share=share)
    planner = MicroBatchPlanner(2, token_budget=96)
    for sample in samples:
        if planner.add(sample) is not Placement.PLACED:
            break
    return planner.finish()


def test_two_samples_in_full() -> None:
    first = make_sample(
        [5, 6, 7, 8],
        [2, 3],
        old_log_probs=[-0.1, -0.2],
        sampler_logprobs=[{7: -0.1, 9: -2.0}, {8: -0.2}],
        versions=[3, 4],
        advantage=1.5,
    )
    second = make_sample([5, 6, 7, 2], [2, 3], old_log_probs=[-0.1, -0.4], advantage=-1.5)
    batch = build(row_of(first, second), size=8, num_sampler_logprobs=2, pad_token_id=1)
    # In the row the second sample comes first: 2 < 8.
    assert batch.tokens.tolist() == [[5, 6, 7, 2, 7, 8, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 3, 0, 0]]
    assert batch.subtree_end.tolist() == [[6, 6, 4, 4, 6, 6, 7, 8]]
    assert (batch.num_tokens.tolist(), batch.num_terms.tolist()) == ([6], [4])
    # Both samples read position 1 for the token 7; they part at its copies, 4 and 2.
    assert batch.term_index.tolist() == [[1, 4, 1, 2, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [[7, 8, 7, 2, 0, 0, 0, 0]]
    np.testing.assert_array_equal(batch.old_log_probs, np.array([[-0.1, -0.2, -0.1, -0.4, 0, 0, 0, 0]], np.float32))
    assert batch.advantages.tolist() == [[1.5, 1.5, -1.5, -1.5, 0, 0, 0, 0]]
    assert batch.term_mask.tolist() == [[True] * 4 + [False] * 4]
    assert batch.term_sample.tolist() == [[0, 0, 1, 1, 7, 7, 7, 7]]
    assert batch.term_versions.tolist() == [[3, 4, 0, 0, -1, -1, -1, -1]]
    assert batch.sampler_ids.tolist() == [[[7, 9], [8, -1], *[[-1, -1]] * 6]]
    none = [-np.inf, -np.inf]
    np.testing.assert_array_equal(
        batch.sampler_log_probs,
        np.array([[[-0.1, -2.0], [-0.2, -np.inf], none, none, none, none, none, none]], np.float32),
    )
    assert batch.candidate_ids.shape == (1, 8, 0)


def test_dtypes_are_as_documented() -> None:
    batch = build(row_of(make_sample([1, 2])), size=4)
    floats = {"old_log_probs", "advantages", "sampler_log_probs"}
    for field in dataclasses.fields(TreeBatch):
        expected = np.float32 if field.name in floats else np.bool_ if field.name == "term_mask" else np.int32
        assert getattr(batch, field.name).dtype == expected, field.name


@pytest.mark.parametrize("seed", range(20))
def test_each_term_sees_exactly_its_own_history(seed: int) -> None:
    rows = random_rows(seed)
    batch = build(*rows, size=128)
    for r, row in enumerate(rows):
        m = 0
        for index, sample in enumerate(row.samples):
            for j, position in enumerate(sample.trained_positions.tolist()):
                query = batch.term_index[r, m]
                visible = np.flatnonzero((np.arange(128) <= query) & (query < batch.subtree_end[r]))
                assert batch.tokens[r, visible].tolist() == sample.input_ids[:position].tolist()
                assert batch.positions[r, visible].tolist() == list(range(position))
                assert batch.targets[r, m] == sample.input_ids[position]
                assert batch.old_log_probs[r, m] == sample.old_log_probs[j]
                assert batch.advantages[r, m] == np.float32(sample.advantage)
                assert batch.term_sample[r, m] == index
                assert batch.term_versions[r, m] == sample.versions[j]
                assert batch.sampler_ids[r, m].tolist() == sample.sampler_ids[j].tolist()
                assert batch.sampler_log_probs[r, m].tolist() == sample.sampler_log_probs[j].tolist()
                m += 1
        assert m == batch.num_terms[r] == batch.term_mask[r].sum()
        assert batch.term_mask[r, :m].all()


def test_a_position_predicts_one_token() -> None:
    for seed in range(20):
        rows = random_rows(seed)
        batch = build(*rows, size=128)
        for r, row in enumerate(rows):
            n = row.num_terms
            pairs = set(zip(batch.term_index[r, :n].tolist(), batch.targets[r, :n].tolist(), strict=True))
            assert len(pairs) == len({index for index, _ in pairs})


def test_duplicates_share_positions_and_keep_their_own_numbers() -> None:
    first = make_sample([5, 6, 7], old_log_probs=[-0.1, -0.2], advantage=2.0, versions=[1, 1])
    second = make_sample([5, 6, 7], old_log_probs=[-0.3, -0.4], advantage=-1.0, versions=[2, 3])
    batch = build(row_of(first, second), size=5)
    assert batch.tokens.tolist() == [[5, 6, 7, 7, 0]]
    assert batch.term_index[0, :4].tolist() == [0, 1, 0, 1]
    assert batch.advantages[0, :4].tolist() == [2.0, 2.0, -1.0, -1.0]
    np.testing.assert_array_equal(batch.old_log_probs[0, :4], np.array([-0.1, -0.2, -0.3, -0.4], np.float32))
    assert batch.term_versions[0, :4].tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_shared_equals_plain_packing(seed: int) -> None:
    rows = random_rows(seed, share=False)
    batch = build(*rows, size=128)
    for r, row in enumerate(rows):
        # Plain packing: samples end to end, here in lexicographic order.
        samples = sorted(row.samples, key=lambda sample: sample.input_ids.tolist())
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        starts: dict[str, int] = {}
        for sample in samples:
            starts[sample.rollout_id] = len(tokens)
            tokens += sample.input_ids.tolist()
            positions += range(sample.num_tokens)
            ends += [len(tokens)] * sample.num_tokens
        n = batch.num_tokens[r]
        assert batch.tokens[r, :n].tolist() == tokens
        assert batch.positions[r, :n].tolist() == positions
        assert batch.subtree_end[r, :n].tolist() == ends
        index = [starts[sample.rollout_id] + p - 1 for sample in row.samples for p in sample.trained_positions]
        assert batch.term_index[r, : len(index)].tolist() == index


@pytest.mark.parametrize("seed", range(5))
def test_pad_length_and_pad_token_change_only_pads(seed: int) -> None:
    rows = random_rows(seed)
    short, long = build(*rows, size=96), build(*rows, size=128, pad_token_id=9)
    for r in range(len(rows)):
        n, m = short.num_tokens[r], short.num_terms[r]
        for names, count in ((PER_POSITION, n), (PER_TERM, m)):
            for name in names:
                np.testing.assert_array_equal(getattr(short, name)[r, :count], getattr(long, name)[r, :count])
        assert (long.tokens[r, n:] == 9).all()
        assert (short.tokens[r, n:] == 0).all()
        assert long.subtree_end[r, n:].tolist() == list(range(n + 1, 129))
        assert not long.positions[r, n:].any()
        assert not long.term_mask[r, m:].any()
        assert not long.term_index[r, m:].any()
        assert (long.sampler_ids[r, m:] == -1).all()
        assert np.isneginf(long.sampler_log_probs[r, m:]).all()
    np.testing.assert_array_equal(short.num_tokens, long.num_tokens)
    np.testing.assert_array_equal(short.num_terms, long.num_terms)


def test_empty_row_is_all_pads() -> None:
    batch = build(row_of(make_sample([1, 2])), row_of(), size=4)
    assert (batch.num_tokens.tolist(), batch.num_terms.tolist()) == ([2, 0], [1, 0])
    assert batch.subtree_end[1].tolist() == [1, 2, 3, 4]
    assert not batch.term_mask[1].any()


def test_sample_without_trained_tokens_is_context_only() -> None:
    batch = build(row_of(make_sample([1, 2], []), make_sample([3, 4])), size=4)
    assert batch.tokens.tolist() == [[1, 2, 3, 4]]
    assert batch.term_index[0, :1].tolist() == [2]
    assert batch.term_sample[0, :1].tolist() == [1]


def test_candidate_sets_are_padded() -> None:
    row = row_of(make_sample([1, 2, 3], sampling_mask=[[2], [3, 5]]), make_sample([1, 4], sampling_mask=[[4, 6, 7]]))
    batch = build_batch([row], 5, num_sampler_logprobs=0, num_candidates=3)
    assert batch.candidate_ids.tolist() == [[[2, -1, -1], [3, 5, -1], [4, 6, 7], [-1] * 3, [-1] * 3]]


def test_arrays_that_do_not_fit_are_refused() -> None:
    with_two = make_sample([1, 2], sampler_logprobs=[{2: -0.1, 3: -1.0}], rollout_id="r1")
    with pytest.raises(ValueError, match="sampler_ids of a sample has 2 columns, the batch is built with 1"):
        build(row_of(with_two), num_sampler_logprobs=1)
    with pytest.raises(ValueError, match="candidate_ids of a sample has 2 columns, the batch is built with 0"):
        build(row_of(make_sample([1, 2], sampling_mask=[[2, 3]])))
    with pytest.raises(ValueError, match="rollout 'r1' has no candidate sets"):
        build_batch([row_of(with_two)], 4, num_sampler_logprobs=2, num_candidates=4)
    with pytest.raises(ValueError, match="a row of 5 tokens or loss terms exceeds the largest size, 4"):
        build(row_of(make_sample([1, 2, 3, 4, 5])), size=4)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (32768, (13440, 16896, 20992, 26240, 32768)),
        (8192, (3456, 4224, 5248, 6656, 8192)),
        (1000, (512, 640, 896, 1024)),
        (512, (256, 384, 512)),
        (128, (128,)),
        (127, (64, 80, 96, 112, 128)),
        (64, (32, 48, 64)),
        (10, (16,)),
    ],
)
def test_bucket_sizes(budget: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(budget) == sizes


def test_largest_bucket_holds_any_budget() -> None:
    for budget in [*range(1, 400), 4095, 4096, 4097, 131072]:
        sizes = bucket_sizes(budget)
        assert sizes[-1] >= budget
        assert len(sizes) <= 5


def test_choose_bucket_by_the_largest_of_tokens_and_terms() -> None:
    repeated = [make_sample([1, 2, 3, 4, 5, 6])] * 3
    assert (row_of(*repeated).num_tokens, row_of(*repeated).num_terms) == (8, 15)
    assert choose_bucket((16, 8, 32), [row_of(*repeated), row_of()]) == 16
    assert choose_bucket((8, 16), [row_of(repeated[0]), row_of()]) == 8
    assert choose_bucket((6, 16), [row_of(repeated[0])]) == 6


def test_batch_metrics() -> None:
    pair = row_of(make_sample([1, 2, 3, 4], [2, 3]), make_sample([1, 2, 3, 5], [3]), token_budget=20)
    single = row_of(make_sample([7, 8]), token_budget=20)
    costs = [(1 + 2 + 3 + 4) + (3 + 4) + 6 * PAIRS_PER_TOKEN, (1 + 2) + 2 * PAIRS_PER_TOKEN]
    metrics = Metrics()
    metrics.merge(
        batch_metrics([pair, single], build_batch([pair, single], 16, num_sampler_logprobs=0, num_candidates=0))
    )
    assert metrics.reduce() == pytest.approx(
        {
            "batch/samples_per_row": 1.5,
            "batch/row_tokens_mean": 4.0,
            "batch/row_tokens_max": 6.0,
            "batch/row_fill_frac": 0.2,
            "batch/row_imbalance": costs[0] / (sum(costs) / 2),
            "batch/packing_ratio": 10 / 8,
            # Trained at 4 of 8 tokens: 2 → 3 and 3 → 4 in the first sample, 3 → 5 in the second, 7 → 8.
            "batch/masked_token_frac": 4 / 8,
            "batch/pad_frac": 1 - 8 / 32,
        }
    )


def test_a_token_that_several_samples_train_is_trained_once() -> None:
    row = row_of(make_sample([1, 2, 3, 4]), make_sample([1, 2, 3, 5]))
    batch = build_batch([row], 16, num_sampler_logprobs=0, num_candidates=0)
    (masked,) = [item for item in batch_metrics([row], batch) if item.name == "batch/masked_token_frac"]
    assert batch.num_terms[0] == 6  # 1 → 2 twice, 2 → 3 twice
    assert (masked.numerator, masked.denominator) == (2.0, 6.0)  # the two last tokens predict nothing

"""Rows to the fixed-shape batch that the train step consumes.

Shapes: R rows, T positions, M loss terms (T = M = the bucket's size), K sampler log-probs, C candidates. Few sizes mean
few compilations: `bucket_sizes` lists those of a run, `choose_bucket` takes the smallest that holds a micro-batch.

Left out: device placement, and metrics over a whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ajgrpo.metrics import Observation
from ajgrpo.packing.planner import Row
from ajgrpo.types import RolloutSample

BUCKET_RATIO = 1.25
NUM_BUCKETS = 5


@dataclasses.dataclass(frozen=True)
class TreeBatch:
    """One micro-batch: R rows (one per data-parallel rank) of T positions and M loss terms.

    A row is a prefix tree in depth-first order; K = ``num_sampler_logprobs``, C = size of the candidate sets (0 when
    sampling is not truncated). Several loss terms may read the same position (samples that share it).

    Attributes:
        tokens: int32 [R, T].
        positions: int32 [R, T], depth in the tree (the position id of each token).
        subtree_end: int32 [R, T]; key k is visible to query q when ``k <= q < subtree_end[k]``. Pad: ``i + 1``.
        num_tokens: int32 [R], how many positions are real.
        term_index: int32 [R, M], the position in the row whose hidden state predicts the term's target.
        targets: int32 [R, M], the token that is predicted.
        old_log_probs: float32 [R, M].
        advantages: float32 [R, M].
        term_mask: bool [R, M], False for padding.
        term_sample: int32 [R, M], which sample of the row the term belongs to (0-based; pad: M - 1 or any, masked).
        term_versions: int32 [R, M], policy version that sampled the token; -1 unknown or pad.
        sampler_ids: int32 [R, M, K], -1 pads.
        sampler_log_probs: float32 [R, M, K], -inf pads.
        candidate_ids: int32 [R, M, C], -1 pads.
        num_terms: int32 [R], how many terms are real (they come first).
    """

    tokens: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    num_tokens: np.ndarray
    term_index: np.ndarray
    targets: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    term_mask: np.ndarray
    term_sample: np.ndarray
    term_versions: np.ndarray
    sampler_ids: np.ndarray
    sampler_log_probs: np.ndarray
    candidate_ids: np.ndarray
    num_terms: np.ndarray


def bucket_sizes(token_budget: int) -> tuple[int, ...]:
    """The row sizes of a run, ascending: the budget divided by 1, 1.25, …, 1.25⁴ (0.41 of it), each rounded up.

    Sizes are multiples of 128, which attention kernels want, or of 16 below a budget of 128; the last one is never
    below the budget. Equal sizes are listed once, so a small budget has fewer than five.
    """
    multiple = 128 if token_budget >= 128 else 16
    sizes = (token_budget / BUCKET_RATIO**i for i in range(NUM_BUCKETS))
    return tuple(sorted({int(np.ceil(size / multiple)) * multiple for size in sizes}))


def choose_bucket(sizes: Sequence[int], rows: Sequence[Row]) -> int:
    """The smallest of ``sizes`` that holds the tokens and the loss terms of every row.

    Raises:
        ValueError: a row holds more than the largest size.
    """
    needed = max(max(row.num_tokens, row.num_terms) for row in rows)
    fitting = [size for size in sizes if size >= needed]
    if not fitting:
        raise ValueError(f"a row of {needed} tokens or loss terms exceeds the largest size, {max(sizes)}")
    return min(fitting)


def build_batch(
    rows: Sequence[Row], size: int, *, num_sampler_logprobs: int, num_candidates: int, pad_token_id: int = 0
) -> TreeBatch:
    """The rows as arrays of ``size`` positions and loss terms.

    Terms come sample by sample, in the order of ``row.samples``. ``pad_token_id`` and the padding have no influence:
    a pad token sees itself only, and a pad term is masked.

    Args:
        rows: one for each rank; a row may be empty.
        size: T and M, at least the largest ``num_tokens`` and ``num_terms``.
        num_sampler_logprobs: K.
        num_candidates: C; 0 when sampling is not truncated.
        pad_token_id: token of the pad positions.

    Raises:
        ValueError: a row exceeds ``size``; a sample holds more than K sampler log-probs or C candidates; or C > 0 and
            a sample has no candidate sets.
    """
    choose_bucket((size,), rows)
    batch = _empty_batch(len(rows), size, num_sampler_logprobs, num_candidates, pad_token_id)
    for r, row in enumerate(rows):
        layout = row.trie.layout()
        n = len(layout.tokens)
        batch.tokens[r, :n] = layout.tokens
        batch.positions[r, :n] = layout.positions
        batch.subtree_end[r, :n] = layout.subtree_end
        batch.num_tokens[r] = n
        batch.num_terms[r] = row.num_terms
        first = 0
        for index, (sample, path) in enumerate(zip(row.samples, layout.paths, strict=True)):
            terms = slice(first, first + sample.num_trained)
            _write_terms(batch, r, terms, index, sample, path)
            first = terms.stop
    return batch


def batch_metrics(rows: Sequence[Row], batch: TreeBatch) -> list[Observation]:
    """The ``batch/*`` metrics of one micro-batch of at least one sample.

    ``row_fill_frac`` is relative to the token budget, ``pad_frac`` to the batch's size; ``masked_token_frac`` counts
    the forwarded tokens at which nothing is trained; ``row_imbalance`` is the cost of the most expensive row over the
    mean; ``packing_ratio`` is tokens of the samples over unique tokens.
    """
    count, num_tokens = len(rows), int(batch.num_tokens.sum())
    costs = [row.cost for row in rows]
    unpacked = sum(sample.num_tokens for row in rows for sample in row.samples)
    trained = sum(len(np.unique(index[mask])) for index, mask in zip(batch.term_index, batch.term_mask, strict=True))
    return [
        Observation("batch/samples_per_row", sum(len(row.samples) for row in rows), count),
        Observation("batch/row_tokens_mean", num_tokens, count),
        Observation("batch/row_tokens_max", int(batch.num_tokens.max())),
        Observation("batch/row_fill_frac", num_tokens, sum(row.token_budget for row in rows)),
        Observation("batch/row_imbalance", max(costs), sum(costs) / count),
        Observation("batch/packing_ratio", unpacked, num_tokens),
        Observation("batch/masked_token_frac", num_tokens - trained, num_tokens),
        Observation("batch/pad_frac", batch.tokens.size - num_tokens, batch.tokens.size),
    ]


def _empty_batch(num_rows: int, size: int, num_sampler_logprobs: int, num_candidates: int, pad_id: int) -> TreeBatch:
    """A batch of pads only."""

    def full(value: float, dtype: type, *shape: int) -> np.ndarray:
        return np.full((num_rows, *shape), value, dtype)

    return TreeBatch(
        tokens=full(pad_id, np.int32, size),
        positions=full(0, np.int32, size),
        subtree_end=np.tile(np.arange(1, size + 1, dtype=np.int32), (num_rows, 1)),
        num_tokens=full(0, np.int32),
        term_index=full(0, np.int32, size),
        targets=full(0, np.int32, size),
        old_log_probs=full(0.0, np.float32, size),
        advantages=full(0.0, np.float32, size),
        term_mask=full(False, np.bool_, size),
        term_sample=full(size - 1, np.int32, size),
        term_versions=full(-1, np.int32, size),
        sampler_ids=full(-1, np.int32, size, num_sampler_logprobs),
        sampler_log_probs=full(-np.inf, np.float32, size, num_sampler_logprobs),
        candidate_ids=full(-1, np.int32, size, num_candidates),
        num_terms=full(0, np.int32),
    )


def _write_terms(batch: TreeBatch, row: int, terms: slice, index: int, sample: RolloutSample, path: np.ndarray) -> None:
    """Writes the loss terms of one sample; a token is predicted at the position of the token before it."""
    batch.term_index[row, terms] = path[sample.trained_positions - 1]
    batch.targets[row, terms] = sample.input_ids[sample.trained_positions]
    batch.old_log_probs[row, terms] = sample.old_log_probs
    batch.advantages[row, terms] = sample.advantage
    batch.term_mask[row, terms] = True
    batch.term_sample[row, terms] = index
    batch.term_versions[row, terms] = sample.versions
    _write_columns(batch.sampler_ids[row, terms], sample.sampler_ids, "sampler_ids")
    _write_columns(batch.sampler_log_probs[row, terms], sample.sampler_log_probs, "sampler_log_probs")
    if sample.candidate_ids is not None:
        _write_columns(batch.candidate_ids[row, terms], sample.candidate_ids, "candidate_ids")
    elif batch.candidate_ids.shape[-1]:
        raise ValueError(f"rollout {sample.rollout_id!r} has no candidate sets, but the batch is built with them")


def _write_columns(target: np.ndarray, values: np.ndarray, name: str) -> None:
    """Writes [M, k] into the first columns of [M, K]."""
    if values.shape[1] > target.shape[1]:
        raise ValueError(f"{name} of a sample has {values.shape[1]} columns, the batch is built with {target.shape[1]}")
    target[:, : values.shape[1]] = values

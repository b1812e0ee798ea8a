"""Turns to training sequences, and training sequences to samples.

Every turn renders the whole conversation anew, and a chat template need not render the earlier part as it was sampled
(some drop earlier reasoning). A turn whose prompt starts with the tokens held so far extends the held sequence; any
other starts a new one (a *fork*):

    turn 1   [p p p] a a a                    held: p p p a a a
    turn 2   [p p p a a a t t] b b            extends: p p p a a a t t b b        trained: a a a, b b
    turn 3   [p p p x t t b b t] c            forks:   p p p x t t b b t c        trained: c

So each generated token is trained in exactly one sequence, after exactly the tokens that it was sampled after.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ajgrpo.types import RolloutSample, TrainingSequence, TurnRecord


@dataclasses.dataclass
class Reconciled:
    """The sequences of one rollout, and how its turns fitted together.

    Attributes:
        sequences: those with at least one trained token, in order.
        num_transitions: turns after the first.
        fork_drifts: for each fork, how many held tokens its prompt no longer starts with.
    """

    sequences: list[TrainingSequence]
    num_transitions: int
    fork_drifts: list[int]


def reconcile(turns: Sequence[TurnRecord]) -> Reconciled:
    """Makes training sequences of a rollout's turns.

    Raises:
        ValueError: a turn's lists disagree in length, log-probs of trained tokens are missing, or a trained token
            stands at position 0.
    """
    sequences: list[TrainingSequence] = []
    fork_drifts: list[int] = []
    held = _Held()
    for index, turn in enumerate(turns):
        _check_turn(index, turn)
        shared = _common_prefix(held.tokens, turn.prompt_ids)
        if shared < len(held.tokens):
            fork_drifts.append(len(held.tokens) - shared)
            sequences += held.finish()
            held = _Held()
        held.extend(index, turn)
    sequences += held.finish()
    return Reconciled(sequences, max(len(turns) - 1, 0), fork_drifts)


class _Held:
    """The sequence that is being built. The lists but ``tokens`` have one entry for each trained token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._positions: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._sampler_logprobs: list[dict[int, float] | None] = []
        self._sampling_masks: list[list[int] | None] = []

    def extend(self, index: int, turn: TurnRecord) -> None:
        """Appends what the turn's prompt adds to the held tokens, then its output."""
        self.tokens += turn.prompt_ids[len(self.tokens) :]
        for offset, token in enumerate(turn.output_ids):
            position = len(self.tokens)
            self.tokens.append(token)
            if turn.output_mask is not None and not turn.output_mask[offset]:
                continue
            if position == 0:
                raise ValueError(f"turn {index}: its prompt is empty, so nothing predicts its first output token")
            self._positions.append(position)
            self._log_probs.append(turn.output_log_probs[offset])
            self._versions.append(turn.output_versions[offset] if turn.output_versions else -1)
            self._sampler_logprobs.append(
                turn.output_sampler_logprobs[offset] if turn.output_sampler_logprobs else None
            )
            self._sampling_masks.append(turn.output_sampling_mask[offset] if turn.output_sampling_mask else None)

    def finish(self) -> list[TrainingSequence]:
        """The sequence, cut after its last trained token, or nothing when no token is trained."""
        if not self._positions:
            return []
        masks = [mask for mask in self._sampling_masks if mask is not None]
        if masks and len(masks) < len(self._sampling_masks):
            raise ValueError("output_sampling_mask must be given for all turns of a sequence or for none")
        has_sampler = any(entry is not None for entry in self._sampler_logprobs)
        return [
            TrainingSequence(
                input_ids=self.tokens[: self._positions[-1] + 1],
                trained_positions=self._positions,
                old_log_probs=self._log_probs,
                versions=self._versions,
                sampler_logprobs=[entry or {} for entry in self._sampler_logprobs] if has_sampler else None,
                sampling_mask=masks or None,
            )
        ]


def _check_turn(index: int, turn: TurnRecord) -> None:
    num_outputs = len(turn.output_ids)
    lists: dict[str, Sequence[Any] | None] = {
        "output_mask": turn.output_mask,
        "output_sampling_mask": turn.output_sampling_mask,
        "output_sampler_logprobs": turn.output_sampler_logprobs,
        "output_versions": turn.output_versions,
    }
    if turn.output_mask is None or any(turn.output_mask):
        lists["output_log_probs"] = turn.output_log_probs
    for name, values in lists.items():
        if values is not None and len(values) != num_outputs:
            raise ValueError(f"turn {index}: {name} has {len(values)} entries for {num_outputs} output tokens")


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def make_sample(
    sequence: TrainingSequence,
    *,
    num_sampler_logprobs: int,
    advantage: float,
    group_id: int,
    row_index: int,
    prompt_index: int,
    model_version: int,
    rollout_id: str,
    queued_at: float,
) -> RolloutSample:
    """The sample of a sequence: its lists as arrays, padded to K = ``num_sampler_logprobs`` and to its largest
    candidate set."""
    num_trained = len(sequence.trained_positions)
    sampler_ids = np.full((num_trained, num_sampler_logprobs), -1, np.int32)
    sampler_log_probs = np.full((num_trained, num_sampler_logprobs), -np.inf, np.float32)
    for row, entries in enumerate(sequence.sampler_logprobs or ()):
        for column, (token, log_prob) in enumerate(most_likely(entries, num_sampler_logprobs).items()):
            sampler_ids[row, column], sampler_log_probs[row, column] = token, log_prob
    return RolloutSample(
        input_ids=np.asarray(sequence.input_ids, np.int32),
        trained_positions=np.asarray(sequence.trained_positions, np.int32),
        old_log_probs=np.asarray(sequence.old_log_probs, np.float32),
        sampler_ids=sampler_ids,
        sampler_log_probs=sampler_log_probs,
        versions=np.asarray(sequence.versions, np.int32),
        candidate_ids=_padded(sequence.sampling_mask) if sequence.sampling_mask is not None else None,
        advantage=advantage,
        group_id=group_id,
        row_index=row_index,
        prompt_index=prompt_index,
        model_version=model_version,
        rollout_id=rollout_id,
        queued_at=queued_at,
    )


def most_likely(log_probs: Mapping[int, float], count: int) -> dict[int, float]:
    """The ``count`` most likely of the given tokens, the likeliest first; tokens of probability 0 never."""
    possible = [(token, value) for token, value in log_probs.items() if value > -math.inf]
    return dict(heapq.nlargest(count, possible, key=lambda entry: entry[1]))


def _padded(candidates: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [M, C], -1 pads."""
    padded = np.full((len(candidates), max(len(ids) for ids in candidates)), -1, np.int32)
    for row, ids in enumerate(candidates):
        padded[row, : len(ids)] = ids
    return padded

"""The vocabulary: the records that travel from prompt to gradient.

    TurnRecord ──▶ Rollout ──▶ RolloutGroup ──▶ RolloutSample ──▶ (queue) ──▶ packing.TreeBatch
                        └──▶ TrainingSequence ──┘

A *turn* is one request to the server; a *rollout* is one conversation; a *group* is one prompt with its
``num_generations`` rollouts; a *training sequence* is what reconciliation makes of a rollout's turns; a *sample*
is a training sequence with its advantage, as it travels through the queue to the trainer.

This module holds data only: no behaviour beyond validation, and nothing but numpy.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import numpy as np

Message = dict[str, Any]
"""A chat message, for example ``{"role": "user", "content": "What is 3 + 4?"}``."""


@dataclasses.dataclass
class TurnRecord:
    """One request to the sampler: the prompt sent and the tokens drawn.

    Example: ``TurnRecord(prompt_ids=[5, 6], output_ids=[7, 2], output_log_probs=[-0.1, -0.3])``.

    Attributes:
        prompt_ids: token ids of the whole prompt, earlier turns of the conversation included.
        output_ids: token ids that the sampler drew.
        output_log_probs: the sampler's log-prob of each token of ``output_ids`` (required where it is trained).
        output_mask: 1 for an output token to train, 0 for one kept as context. None: all are trained.
        output_sampling_mask: for each output token the ids that it could have been (top-k/top-p/min-p).
            None: the whole vocabulary.
        output_sampler_logprobs: for each output token the sampler's most likely tokens, id → log-prob.
        output_versions: for each output token the policy version that sampled it. None: unknown.
        finish_reason: ``"stop"`` (an end-of-sequence token) or ``"length"``; None if unknown.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float] = dataclasses.field(default_factory=list)
    output_mask: list[int] | None = None
    output_sampling_mask: list[list[int]] | None = None
    output_sampler_logprobs: list[dict[int, float]] | None = None
    output_versions: list[int] | None = None
    finish_reason: str | None = None


@dataclasses.dataclass
class Rollout:
    """One finished conversation for a prompt.

    Example: ``Rollout(completion=[{"role": "assistant", "content": "7"}], completion_ids=[23, 2], turns=[turn])``.

    Attributes:
        completion: messages after the prompt; what reward functions get as ``completions``.
        completion_ids: token ids of the completion; what reward functions get as ``completion_ids``.
        turns: the requests that produced it, in order.
        tool_call_count: number of tool calls made.
        tool_failure_count: how many of them failed.
        reward: a reward computed during generation, added to the other sources. None: not applicable.
        rollout_id: identifies the rollout in logs.
        duration_s: wall time from dispatch to collection.
    """

    completion: list[Message]
    completion_ids: list[int]
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None
    rollout_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    duration_s: float = 0.0


@dataclasses.dataclass
class TrainingSequence:
    """One token sequence to train on; a rollout yields one or several.

    All lists but ``input_ids`` have one entry for each *trained* token, in order of position; ``trained_positions[m]``
    is the index into ``input_ids`` of trained token m (never 0: the first token is predicted by nothing).

    Example: prompt ``[5, 6]``, output ``[7, 2]`` →
    ``TrainingSequence(input_ids=[5, 6, 7, 2], trained_positions=[2, 3], old_log_probs=[-0.1, -0.3], versions=[0, 0])``.
    """

    input_ids: list[int]
    trained_positions: list[int]
    old_log_probs: list[float]
    versions: list[int]
    sampler_logprobs: list[dict[int, float]] | None = None
    sampling_mask: list[list[int]] | None = None


@dataclasses.dataclass
class RolloutGroup:
    """One prompt's rollouts, scored together. Every list has one entry for each rollout.

    Example: two rollouts of ``"3 + 4?"`` with ``rewards = array([1., 0.])``.

    Attributes:
        prompts: the prompt messages (the same for each rollout unless an environment changes them).
        reward_kwargs: the row's other columns, repeated; keyword arguments of the reward functions.
        completions: completion messages.
        completions_ids: completion token ids.
        completions_sequences: the training sequences of each rollout.
        tool_call_counts: tool calls made.
        tool_failure_counts: tool calls failed.
        model_version: the policy version when the group's first rollout started.
        group_id: counts the groups from 0.
        row_index: the prompt's row in the dataset.
        env_rewards: (environment class, reward), or None.
        rollout_rewards: each ``Rollout.reward``.
        queued_at: ``time.monotonic()`` when the group entered the score queue.
        rewards: float64 [G], the summed reward, NaN where unscored. Set before ``compute_advantages``.
        prompt_index: position of the prompt in the stream of prompts over all epochs.
    """

    prompts: list[list[Message]]
    reward_kwargs: dict[str, list[Any]]
    completions: list[list[Message]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[TrainingSequence]]
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int
    group_id: int
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]
    queued_at: float = 0.0
    rewards: np.ndarray | None = None
    prompt_index: int = 0


@dataclasses.dataclass
class RolloutSample:
    """What the loss is computed on: one sequence with its mask, old log-probs and one advantage.

    T tokens, M trained ones, K = ``num_sampler_logprobs``.

    Attributes:
        input_ids: int32 [T].
        trained_positions: int32 [M], ascending indices into ``input_ids``, each ≥ 1.
        old_log_probs: float32 [M], the sampler's log-probs.
        sampler_ids: int32 [M, K], the sampler's most likely tokens; -1 pads.
        sampler_log_probs: float32 [M, K]; -inf where padded.
        versions: int32 [M], the policy version that sampled each trained token (-1: unknown).
        candidate_ids: int32 [M, C], the set that each token was drawn from under top-k/top-p/min-p (-1 pads), or
            None when tokens are drawn from the whole vocabulary.
        advantage: the rollout's advantage.
        group_id: the sample's group.
        row_index: the prompt's row in the dataset.
        prompt_index: position of the prompt in the stream of prompts over all epochs.
        model_version: the policy version when the group's first rollout started; staleness is counted from it.
        rollout_id: the rollout that it comes from.
        queued_at: ``time.monotonic()`` when it entered the rollout queue.

    Example: see ``tests/helpers.py::make_sample``.
    """

    input_ids: np.ndarray
    trained_positions: np.ndarray
    old_log_probs: np.ndarray
    sampler_ids: np.ndarray
    sampler_log_probs: np.ndarray
    versions: np.ndarray
    candidate_ids: np.ndarray | None
    advantage: float
    group_id: int
    row_index: int
    prompt_index: int
    model_version: int
    rollout_id: str = ""
    queued_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """T, all tokens of the sample."""
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """M, the tokens that carry a loss term."""
        return len(self.trained_positions)


@dataclasses.dataclass
class GroupDone:
    """Tells the trainer that a prompt needs no more training: sent on the rollout queue for every group.

    The trainer counts an epoch in these (a dropped or filtered prompt counts as done), and takes from them the first
    prompt that is not yet trained (``rollout_state.json``). Example: ``GroupDone(prompt_index=7, num_samples=0)``.

    Attributes:
        prompt_index: position of the prompt in the stream of prompts over all epochs.
        num_samples: how many samples of this group were queued before this record; 0 for a dropped group.
    """

    prompt_index: int
    num_samples: int

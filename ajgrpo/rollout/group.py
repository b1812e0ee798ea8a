"""A group while its rollouts run, and what is made of it when the last one is back."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ajgrpo.errors import AjgrpoError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.prompts import Prompt
from ajgrpo.rollout.reconcile import Reconciled, make_sample, reconcile
from ajgrpo.types import Message, Rollout, RolloutGroup, RolloutSample


@dataclasses.dataclass
class Generated:
    """A rollout that succeeded, with the prompt that it started from and (environment class, reward), or None."""

    rollout: Rollout
    prompt: list[Message]
    env_reward: tuple[type, float] | None = None


class OpenGroup:
    """Collects the outcomes of one prompt's rollouts, in whatever order they finish.

    Attributes:
        prompt: the prompt.
        group_id: counts the groups from 0.
        model_version: policy version when the first rollout started; set by whoever starts it.
        tasks: the rollouts' tasks by index, set by whoever starts them.
        given_up: whether the rollouts that still ran were cancelled.
    """

    def __init__(self, prompt: Prompt, group_id: int, size: int):
        self.prompt, self.group_id = prompt, group_id
        self.model_version = 0
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.given_up = False
        self._outcomes: list[Generated | AjgrpoError | None] = [None] * size

    def settle(self, index: int, outcome: Generated | AjgrpoError) -> bool:
        """Notes how rollout ``index`` ended; True when it was the last."""
        self._outcomes[index] = outcome
        return None not in self._outcomes

    @property
    def waits_for_stragglers(self) -> bool:
        """Whether all rollouts have started and at least half of them, and two, have just succeeded."""
        return len(self.tasks) == len(self._outcomes) and len(self.generated) == max(2, -(-len(self._outcomes) // 2))

    def give_up(self) -> None:
        """Cancels the rollouts that still run."""
        for index, outcome in enumerate(self._outcomes):
            if outcome is None:
                self.given_up = True
                self.tasks[index].cancel()

    @property
    def generated(self) -> list[Generated]:
        """The rollouts that succeeded, by index."""
        return [outcome for outcome in self._outcomes if isinstance(outcome, Generated)]

    @property
    def errors(self) -> list[AjgrpoError]:
        """What the others ended with."""
        return [outcome for outcome in self._outcomes if isinstance(outcome, AjgrpoError)]


@dataclasses.dataclass
class CollectedGroup:
    """A finished group on its way to the scorer. ``rollouts`` and ``reconciled`` have one entry per rollout."""

    prompt: Prompt
    group: RolloutGroup
    rollouts: list[Rollout]
    reconciled: list[Reconciled]

    @property
    def num_tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(len(sequence.input_ids) for each in self.reconciled for sequence in each.sequences)

    def samples(self, advantages: np.ndarray, num_sampler_logprobs: int) -> list[RolloutSample]:
        """The group's samples; each carries its rollout's entry of ``advantages`` (float64 [G])."""
        return [
            make_sample(
                sequence,
                num_sampler_logprobs=num_sampler_logprobs,
                advantage=float(advantage),
                group_id=self.group.group_id,
                row_index=self.group.row_index,
                prompt_index=self.group.prompt_index,
                model_version=self.group.model_version,
                rollout_id=rollout.rollout_id,
                queued_at=time.monotonic(),
            )
            for rollout, each, advantage in zip(self.rollouts, self.reconciled, advantages, strict=True)
            for sequence in each.sequences
        ]


def collect(opened: OpenGroup) -> CollectedGroup:
    """Reconciles the rollouts that succeeded and lines them up for scoring.

    Raises:
        ValueError: a rollout's turns are inconsistent (see ``reconcile``).
    """
    prompt, generated = opened.prompt, opened.generated
    rollouts = [each.rollout for each in generated]
    reconciled = [reconcile(rollout.turns) for rollout in rollouts]
    size = len(rollouts)
    group = RolloutGroup(
        prompts=[each.prompt for each in generated],
        reward_kwargs={name: [value] * size for name, value in prompt.columns.items()},
        completions=[rollout.completion for rollout in rollouts],
        completions_ids=[rollout.completion_ids for rollout in rollouts],
        completions_sequences=[each.sequences for each in reconciled],
        tool_call_counts=[rollout.tool_call_count for rollout in rollouts],
        tool_failure_counts=[rollout.tool_failure_count for rollout in rollouts],
        model_version=opened.model_version,
        group_id=opened.group_id,
        row_index=prompt.row_index,
        env_rewards=[each.env_reward for each in generated],
        rollout_rewards=[rollout.reward for rollout in rollouts],
        queued_at=time.monotonic(),
        prompt_index=prompt.index,
    )
    return CollectedGroup(prompt, group, rollouts, reconciled)


def num_generated(rollout: Rollout) -> int:
    """Tokens that the model sampled in all turns of a rollout."""
    return sum(len(turn.output_ids) for turn in rollout.turns)


def is_terminated(rollout: Rollout, eos_token_ids: Sequence[int]) -> bool:
    """Whether the last turn ended by itself: with an end-of-sequence token, or as its finish reason says."""
    if not rollout.turns:
        return False
    last = rollout.turns[-1]
    return last.finish_reason == "stop" or bool(last.output_ids and last.output_ids[-1] in eos_token_ids)


def add_rollout_metrics(metrics: Metrics, collected: CollectedGroup, eos_token_ids: Sequence[int]) -> None:
    """Adds ``completions/*`` and the ``rollout/*`` that are measured on rollouts."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for rollout, reconciled in zip(collected.rollouts, collected.reconciled, strict=True):
        terminated, outputs = is_terminated(rollout, eos_token_ids), tuple(tuple(t.output_ids) for t in rollout.turns)
        for reduced in ("mean", "min", "max"):
            metrics.add(f"completions/{reduced}_length", num_generated(rollout))
            if terminated:
                metrics.add(f"completions/{reduced}_terminated_length", num_generated(rollout))
        metrics.add("completions/clipped_ratio", not terminated)
        metrics.add("completions/duplicate_frac", outputs in seen)
        seen.add(outputs)
        metrics.add("rollout/duration_s", rollout.duration_s)
        metrics.add("rollout/turns_mean", len(rollout.turns))
        metrics.add("rollout/turns_max", len(rollout.turns))
        metrics.add("rollout/samples_per_rollout", len(reconciled.sequences))
        metrics.add_rate("rollout/fork_frac", len(reconciled.fork_drifts), reconciled.num_transitions)
        metrics.add_rate("rollout/drift_tokens_mean", sum(reconciled.fork_drifts), reconciled.num_transitions)
        if reconciled.num_transitions:
            metrics.add("rollout/drift_tokens_max", max(reconciled.fork_drifts, default=0))

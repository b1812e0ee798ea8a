"""Samples for tests: built by hand from lists, or drawn at random in every shape that packing meets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ajgrpo.types import RolloutSample


def make_sample(
    input_ids: Sequence[int],
    trained_positions: Sequence[int] | None = None,
    *,
    old_log_probs: Sequence[float] | None = None,
    sampler_logprobs: Sequence[dict[int, float]] | None = None,
    num_sampler_logprobs: int | None = None,
    sampling_mask: Sequence[Sequence[int]] | None = None,
    versions: Sequence[int] | None = None,
    advantage: float = 1.0,
    group_id: int = 0,
    row_index: int | None = None,
    prompt_index: int | None = None,
    model_version: int = 0,
    rollout_id: str = "",
    queued_at: float = 0.0,
) -> RolloutSample:
    """A sample from plain lists. M is the number of trained positions.

    Defaults: every token but the first is trained; old log-probs -0.5; no sampler log-probs (K = 0, or
    ``num_sampler_logprobs`` columns of pads); versions ``model_version``; row and prompt index ``group_id``.

    Example: ``make_sample([5, 6, 7, 2], [2, 3], old_log_probs=[-0.1, -0.3], advantage=-1.0)``.
    """
    positions = list(range(1, len(input_ids))) if trained_positions is None else list(trained_positions)
    count = len(positions)
    tops = [{} for _ in positions] if sampler_logprobs is None else list(sampler_logprobs)
    width = max((len(top) for top in tops), default=0) if num_sampler_logprobs is None else num_sampler_logprobs
    candidates = None if sampling_mask is None else max((len(ids) for ids in sampling_mask), default=0)
    return RolloutSample(
        input_ids=np.asarray(input_ids, np.int32),
        trained_positions=np.asarray(positions, np.int32),
        old_log_probs=np.asarray([-0.5] * count if old_log_probs is None else old_log_probs, np.float32),
        sampler_ids=_padded([list(top) for top in tops], width, -1, np.int32),
        sampler_log_probs=_padded([list(top.values()) for top in tops], width, -math.inf, np.float32),
        versions=np.asarray([model_version] * count if versions is None else versions, np.int32),
        candidate_ids=None if candidates is None else _padded(sampling_mask or [], candidates, -1, np.int32),
        advantage=advantage,
        group_id=group_id,
        row_index=group_id if row_index is None else row_index,
        prompt_index=group_id if prompt_index is None else prompt_index,
        model_version=model_version,
        rollout_id=rollout_id,
        queued_at=queued_at,
    )


def random_samples(
    rng: np.random.Generator,
    *,
    num_groups: int = 4,
    group_size: int = 4,
    vocab_size: int = 32,
    max_prompt: int = 8,
    max_completion: int = 12,
    num_sampler_logprobs: int = 3,
    share: bool = True,
) -> list[RolloutSample]:
    """``num_groups · group_size`` samples of at least 2 tokens, group after group; rollout ids are ``"group.member"``.

    With ``share``: about half of the groups begin with a common system prompt; the members of a group continue its
    prompt, fork inside an earlier member, repeat one, or are a prefix of one. Without: every sample begins with a
    token of its own (``vocab_size`` must be at least the number of samples), so nothing is shared.
    """
    if not share and vocab_size < num_groups * group_size:
        raise ValueError("vocab_size must be at least num_groups * group_size when nothing is shared")

    def draw(low: int, high: int) -> list[int]:
        return rng.integers(vocab_size, size=rng.integers(low, high + 1)).tolist()

    system = draw(1, max_prompt)
    samples: list[RolloutSample] = []
    for group in range(num_groups):
        prompt = (system if rng.random() < 0.5 else []) + draw(1, max_prompt)
        members: list[list[int]] = []
        for member in range(group_size):
            kind = rng.choice(["continue", "fork", "repeat", "prefix"], p=[0.5, 0.25, 0.15, 0.1])
            if not share:
                tokens = [len(samples), *draw(1, max_prompt + max_completion)]
            elif kind == "continue" or not members:
                tokens = prompt + draw(1, max_completion)
            else:
                other = members[rng.integers(len(members))]
                cut = int(rng.integers(2, len(other) + 1))
                tokens = {"fork": other[:cut] + draw(1, max_completion), "repeat": other, "prefix": other[:cut]}[kind]
            members.append(tokens)
            samples.append(_random_terms(rng, tokens, group, member, vocab_size, num_sampler_logprobs))
    return samples


def _random_terms(
    rng: np.random.Generator, tokens: list[int], group: int, member: int, vocab_size: int, num_sampler_logprobs: int
) -> RolloutSample:
    """A sample of ``tokens`` with a random trained mask (at least one token), log-probs, versions and advantage."""
    count = int(rng.integers(1, len(tokens)))
    positions = np.sort(rng.choice(np.arange(1, len(tokens)), count, replace=False))
    top_count = min(num_sampler_logprobs, vocab_size)
    tops = []
    for _ in range(count):
        ids = rng.choice(vocab_size, top_count, replace=False).tolist()
        log_probs = np.sort(np.log(rng.dirichlet(np.ones(top_count + 1))[:top_count]))[::-1].tolist()
        tops.append(dict(zip(ids, log_probs, strict=True)))
    return make_sample(
        tokens,
        positions.tolist(),
        old_log_probs=(-rng.exponential(size=count)).tolist(),
        sampler_logprobs=tops,
        num_sampler_logprobs=num_sampler_logprobs,
        versions=rng.integers(4, size=count).tolist(),
        advantage=float(rng.normal()),
        group_id=group,
        rollout_id=f"{group}.{member}",
    )


def _padded(rows: Sequence[Sequence[float]], width: int, pad: float, dtype: type) -> np.ndarray:
    """[len(rows), width], each row followed by pads."""
    array: np.ndarray = np.full((len(rows), width), pad, dtype)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return array

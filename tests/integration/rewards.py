"""Reward functions that turn bad in the middle of a run, for the worker's process to import."""

from __future__ import annotations

import itertools
from typing import Any

from ajgrpo.rewards import exact_match_reward

SOUND_CALLS = 40

_calls = itertools.count()


def turns_into_text(completions: list[Any], **columns: Any) -> list[Any]:
    """Sound for ``SOUND_CALLS`` groups, then one reward is a string."""
    rewards: list[Any] = list(exact_match_reward(completions=completions, **columns))
    if next(_calls) >= SOUND_CALLS:
        rewards[0] = "0.5"
    return rewards

"""Ready-made reward functions, and the parts to make one's own of.

Each is called once per group with lists (one entry per completion) and returns one float or None per completion. All
can be pickled: the classes take their settings at construction, the functions through ``functools.partial``:

    reward_funcs=[exact_match_reward, SoftOverlongPenalty(max_length=2048, buffer=256)]
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from ajgrpo.errors import ConfigError
from ajgrpo.types import Message

THINK_ANSWER = r"\s*<think>(?:(?!<think>).)*?</think>\s*<answer>(?:(?!<answer>).)*?</answer>\s*"
"""Regular expression of a completion that reasons and then answers, each once and inside its tags."""


def completion_text(completion: Sequence[Message]) -> str:
    """Text of the last assistant message; empty when there is none or it has no text."""
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return message.get("content") or ""
    return ""


def exact_match_reward(completions: list[list[Message]], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where the completion's text is the answer, else 0.0; None where ``answer`` is None.

    Both are compared as text after white space at both ends has been removed; nothing else is normalised, so ``"7."``
    and ``"07"`` are not ``"7"``.

    Args:
        completions: messages.
        answer: the dataset's column of that name; numbers are compared by their ``str``.
    """
    return [
        None if expected is None else float(completion_text(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def format_reward(
    completions: list[list[Message]], *, format_pattern: str = THINK_ANSWER, **kwargs: Any
) -> list[float]:
    """1.0 where the whole text of the completion matches a pattern, else 0.0.

    Args:
        completions: messages.
        format_pattern: regular expression (``.`` matches line breaks); default: ``<think>…</think><answer>…</answer>``.
    """
    pattern = re.compile(format_pattern, re.DOTALL)
    return [float(pattern.fullmatch(completion_text(completion)) is not None) for completion in completions]


def accuracy_reward(completions: list[list[Message]], solution: list[str], **kwargs: Any) -> list[float | None]:
    """1.0 where the completion's final expression equals the solution's mathematically, else 0.0.

    None where the solution itself holds no expression that can be read, since no completion could be right.

    Args:
        completions: messages.
        solution: the dataset's column of that name: text with the right expression, usually in ``$…$`` or ``\\boxed``.

    Raises:
        ConfigError: the package math-verify is missing.
    """
    parse, verify = _math_verify()
    rewards: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        gold = parse(expected)
        rewards.append(float(verify(gold, parse(completion_text(completion)))) if gold else None)
    return rewards


def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    try:
        import math_verify
    except ImportError as exc:
        raise ConfigError(
            "accuracy_reward needs the package math-verify; install it with: pip install 'ajgrpo[math]'"
        ) from exc
    # Its own time limits use signals, which only a process's main thread may set; reward functions run in threads.
    return (
        lambda text: math_verify.parse(text, parsing_timeout=None),
        lambda gold, found: math_verify.verify(gold, found, timeout_seconds=None),
    )


@dataclasses.dataclass(frozen=True)
class SoftOverlongPenalty:
    """Punishes completions that come close to a length limit (DAPO, arXiv:2503.14476, equation 13).

    0 up to ``max_length - buffer`` tokens, then falling linearly to -1 at ``max_length``, and -1 beyond.

    Attributes:
        max_length: tokens at which the penalty is full.
        buffer: tokens over which it grows.
    """

    max_length: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_length:
            raise ConfigError(
                f"SoftOverlongPenalty needs 0 < buffer <= max_length, got buffer={self.buffer} and "
                f"max_length={self.max_length}"
            )

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        free = self.max_length - self.buffer
        return [-min(max(len(ids) - free, 0) / self.buffer, 1.0) for ids in completion_ids]


@dataclasses.dataclass(frozen=True)
class TargetLengthReward:
    """Rewards completions of a wanted length: 1 at ``target`` tokens, falling linearly to 0 at 0 and at 2 · ``target``.

    Attributes:
        target: the wanted number of tokens.
    """

    target: int

    def __post_init__(self) -> None:
        if self.target < 1:
            raise ConfigError(f"TargetLengthReward needs target >= 1, got {self.target}")

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [max(1.0 - abs(len(ids) - self.target) / self.target, 0.0) for ids in completion_ids]

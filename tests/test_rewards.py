"""Ready-made reward functions."""

from __future__ import annotations

import pickle
import sys
import types
from functools import partial
from typing import Any

import pytest

from ajgrpo.errors import ConfigError
from ajgrpo.rewards import (
    SoftOverlongPenalty,
    TargetLengthReward,
    accuracy_reward,
    completion_text,
    exact_match_reward,
    format_reward,
)


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_completion_text_is_that_of_the_last_assistant_message() -> None:
    conversation = [
        {"role": "assistant", "content": "let me look"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
        {"role": "user", "content": "thanks"},
    ]
    assert completion_text(conversation) == "it is 42"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == ""


def test_exact_match_strips_white_space_and_nothing_else() -> None:
    completions = said(" 7\n", "7.", "07", "7", "7")
    assert exact_match_reward(completions, answer=["7", "7", "7", 7, None]) == [1.0, 0.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think><answer>7</answer>", 1.0),
        ("  <think>a</think>\n<answer>7</answer>\n", 1.0),
        ("<think>a</think> so <answer>7</answer>", 0.0),
        ("<think>a</think><answer>7</answer> done", 0.0),
        ("<think>a<think>b</think><answer>7</answer>", 0.0),
        ("<answer>7</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(text: str, expected: float) -> None:
    assert format_reward(said(text)) == [expected]


def test_format_reward_with_another_pattern_can_be_pickled() -> None:
    digits = pickle.loads(pickle.dumps(partial(format_reward, format_pattern=r"\d+")))
    assert digits(completions=said("12", "12 "), prompts=[], answer=["x", "y"]) == [1.0, 0.0]


def test_overlong_penalty_grows_over_its_buffer() -> None:
    penalty = pickle.loads(pickle.dumps(SoftOverlongPenalty(max_length=10, buffer=4)))
    lengths = [0, 6, 7, 9, 10, 30]
    assert penalty(completion_ids=[[0] * n for n in lengths], prompts=[]) == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]


def test_target_length() -> None:
    reward = TargetLengthReward(target=4)
    assert reward(completion_ids=[[0] * n for n in (0, 2, 4, 5, 8, 20)]) == [0.0, 0.5, 1.0, 0.75, 0.0, 0.0]


@pytest.mark.parametrize("buffer", [0, 11])
def test_length_helpers_refuse_settings_without_meaning(buffer: int) -> None:
    with pytest.raises(ConfigError, match=f"buffer={buffer}"):
        SoftOverlongPenalty(max_length=10, buffer=buffer)
    with pytest.raises(ConfigError, match="target >= 1, got 0"):
        TargetLengthReward(target=0)


def test_accuracy_reward_without_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'ajgrpo\[math\]'"):
        accuracy_reward(said("7"), solution=["7"])


def test_accuracy_reward_compares_what_math_verify_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in reads the number after ``=``; its time limits must be off, since they only work in a main thread."""

    def parse(text: str, *, parsing_timeout: int | None) -> list[float]:
        assert parsing_timeout is None
        return [float(text.split("=")[1])] if "=" in text else []

    def verify(gold: list[Any], found: list[Any], *, timeout_seconds: int | None) -> bool:
        assert timeout_seconds is None
        return gold == found

    stand_in = types.ModuleType("math_verify")
    vars(stand_in).update(parse=parse, verify=verify)
    monkeypatch.setitem(sys.modules, "math_verify", stand_in)
    rewards = accuracy_reward(said("x=7.0", "x=8", "none", "x=7"), solution=["y=7", "y=7", "y=7", "unreadable"])
    assert rewards == [1.0, 0.0, 0.0, None]

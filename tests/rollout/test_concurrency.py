"""Bookkeeping of tokens ahead of the trainer, and of rollouts in flight."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajgrpo.rollout.concurrency import LENGTH_WINDOW, RolloutSlots, TokenPacer


def test_one_group_at_a_time_until_the_first_tells_its_length() -> None:
    pacer = TokenPacer()
    assert pacer.may_start(1000, 0)
    pacer.start_group()
    assert not pacer.may_start(1000, 0)
    pacer.abandon_group()  # told nothing
    assert pacer.may_start(1000, 0) and pacer.expected_group_tokens is None
    pacer.start_group()
    pacer.finish_group(tokens=100, queued_tokens=100)
    assert pacer.expected_group_tokens == 100
    for groups in range(9):
        assert pacer.held(0) == 100 + 100 * groups
        assert pacer.may_start(1000, 0)
        pacer.start_group()
    assert pacer.held(0) == 1000 and not pacer.may_start(1000, 0)


def test_taken_and_dropped_tokens_make_room() -> None:
    pacer = TokenPacer()
    pacer.start_group()
    pacer.finish_group(tokens=100, queued_tokens=100)
    pacer.start_group()
    assert not pacer.may_start(250, 0)
    assert pacer.may_start(250, taken_tokens=50)
    pacer.finish_group(tokens=100, queued_tokens=0)  # dropped: equal rewards
    assert pacer.held(0) == 100 and pacer.may_start(250, 0)


def test_a_group_larger_than_the_allowance_runs_alone() -> None:
    pacer = TokenPacer()
    pacer.start_group()
    pacer.finish_group(tokens=100, queued_tokens=100)
    assert not pacer.may_start(10, taken_tokens=99)
    assert pacer.may_start(10, taken_tokens=100)
    pacer.start_group()
    assert not pacer.may_start(10, taken_tokens=100)


def test_expected_length_follows_the_last_groups() -> None:
    pacer = TokenPacer()
    for tokens in [1000] * 3 + [10] * LENGTH_WINDOW:
        pacer.start_group()
        pacer.finish_group(tokens, 0)
    assert pacer.expected_group_tokens == 10


@given(
    length=st.integers(1, 50),
    allowance=st.integers(0, 200),
    choices=st.randoms(use_true_random=False),
)
def test_held_tokens_stay_within_the_allowance(length: int, allowance: int, choices: random.Random) -> None:
    """With groups of equal length the bound is exact, whatever the order of events: max(allowance, one group)."""
    pacer, in_flight, queued, taken = TokenPacer(), 0, 0, 0
    for _ in range(100):
        event = choices.choice(["start", "finish", "take"])
        if event == "start" and pacer.may_start(allowance, taken):
            pacer.start_group()
            in_flight += 1
        elif event == "finish" and in_flight:
            pacer.finish_group(length, length)
            in_flight, queued = in_flight - 1, queued + length
        elif event == "take" and queued > taken:
            taken += length
        assert queued - taken + in_flight * length <= max(allowance, length)


def test_slots() -> None:
    slots = RolloutSlots(2)
    slots.acquire()
    slots.acquire()
    assert not slots.available
    with pytest.raises(AssertionError, match="2 rollouts in flight, cap 2"):
        slots.acquire()
    slots.release()
    assert slots.available
    slots.cap = 1
    assert not slots.available and slots.in_flight == 1

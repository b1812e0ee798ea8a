"""Bookkeeping of tokens ahead of the trainer, and of rollouts in flight."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajgrpo.inference.client import parse_metrics
from ajgrpo.rollout.concurrency import LENGTH_WINDOW, LoadCap, RolloutSlots, ServerLoad, TokenPacer


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


# The server's load

METRICS = """
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting{engine="1"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:num_preemptions_total{engine="0"} 2.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300"} 1.0
"""


def test_the_load_is_read_over_all_engines() -> None:
    load = ServerLoad.read(parse_metrics(METRICS))
    assert load == ServerLoad(cache_usage=0.5, running=7, waiting=1, preemptions=2, cache_tokens=16 * 400)
    assert ServerLoad.read({"other": 1.0}) is None


def load(usage: float, waiting: float = 0, cache_tokens: float | None = 8000) -> ServerLoad:
    return ServerLoad(usage, 0, waiting, 0, cache_tokens)


def test_the_cap_follows_a_recorded_load() -> None:
    """(usage, waiting, rollouts finished so far) → the cap, by the rule: +25 % below 60 % with nothing waiting and a
    cap's worth of rollouts finished since the last raise; -30 % above 80 %."""
    cap = LoadCap(64, max_model_len=100)
    trace = [
        ((0.00, 0, 0), 64),  # 8000 / 100 = 80, but at most 64
        ((0.85, 0, 10), 44),
        ((0.81, 5, 20), 30),
        ((0.80, 0, 90), 30),
        ((0.70, 0, 95), 30),
        ((0.59, 1, 99), 30),
        ((0.59, 0, 100), 37),
        ((0.10, 0, 136), 37),
        ((0.10, 0, 137), 46),
        ((0.10, 0, 183), 57),
        ((0.10, 0, 240), 64),
        ((0.10, 0, 999), 64),
    ]
    assert [cap.update(load(usage, waiting), finished) for (usage, waiting, finished), _ in trace] == [
        expected for _, expected in trace
    ]


def test_the_cap_stays_within_its_bounds() -> None:
    small = LoadCap(8, max_model_len=100)
    assert small.update(load(0.0, cache_tokens=50), 0) == 1
    assert small.update(load(0.9), 0) == 1
    assert [small.update(load(0.0), finished) for finished in (1, 3, 6, 10)] == [2, 3, 4, 5]
    assert LoadCap(8, max_model_len=100).update(load(0.9, cache_tokens=None), 0) == 8

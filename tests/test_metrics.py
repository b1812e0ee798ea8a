import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajgrpo.metrics import Metrics, Observation, reduction


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("rollout/vllm_retry_count", "sum"),
        ("tools/add/call_count", "sum"),
        ("count/loss", "mean"),
        ("sampling/sampling_logp_difference/max", "max"),
        ("completions/min_length", "min"),
        ("sample/staleness_max", "max"),
        ("max/entropy", "mean"),
        ("rollout/samples_per_rollout", "mean"),
        ("discount", "mean"),
        ("clip_ratio/low_min", "min"),
    ],
)
def test_the_last_part_of_the_name_says_how_to_reduce(name, how):
    assert reduction(name) == how


def test_each_kind_of_reduction():
    metrics = Metrics()
    for value in (1.0, 2.0, 6.0):
        metrics.update({"a_count": value, "a_max": value, "a_min": value, "a": value})
    assert metrics.reduce() == {"a": 3.0, "a_count": 9.0, "a_max": 6.0, "a_min": 1.0}


def test_a_rate_is_the_ratio_of_sums_not_the_mean_of_ratios():
    metrics = Metrics()
    metrics.add_rate("failure", 1, 1)
    metrics.add_rate("failure", 0, 9)
    metrics.add("weighted", 4.0, weight=3.0)
    metrics.add("weighted", 0.0, weight=1.0)
    assert metrics.reduce() == {"failure": 0.1, "weighted": 3.0}


def test_what_is_not_applicable_is_left_out():
    metrics = Metrics()
    for value in (math.nan, math.inf):
        metrics.add("loss", value)
    metrics.add_rate("empty", 0, 0)
    metrics.add_rate("empty_max", 0, 0)
    assert metrics.reduce() == {}


def test_observations_travel_and_are_drained_once():
    worker, trainer = Metrics(), Metrics()
    worker.add_rate("tools/failure_frequency", 1, 4)
    drained = worker.drain()
    assert drained == [Observation("tools/failure_frequency", 1.0, 4.0)]
    assert worker.drain() == []
    trainer.merge(drained)
    assert trainer.reduce() == {"tools/failure_frequency": 0.25}


def test_the_timer_counts_also_when_the_block_raises(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    with pytest.raises(KeyError), metrics.timer("perf/step_s"):
        raise KeyError
    assert metrics.reduce() == {"perf/step_s": 2.5}


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(1, 8)), min_size=1), st.integers(0, 8))
def test_a_split_into_windows_merged_again_changes_nothing(rates, cut):
    whole, merged = Metrics(), Metrics()
    for part in (rates[:cut], rates[cut:]):
        window = Metrics()
        for numerator, denominator in part:
            for name in ("a", "a_max", "a_min", "a_count"):
                window.add_rate(name, numerator, denominator)
                whole.add_rate(name, numerator, denominator)
        merged.merge(window.drain())
    assert merged.reduce() == whole.reduce()

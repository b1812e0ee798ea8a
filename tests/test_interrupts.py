"""Requests to stop: one signal stops in order, a double delivery is one request, only a later Ctrl-C forces."""

from __future__ import annotations

import signal

import pytest

from ajgrpo import interrupts
from ajgrpo.interrupts import REPEAT_S, StopSignal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_twice_at_once_is_one_request(number: signal.Signals, clock: list[float]) -> None:
    with StopSignal() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        clock[0] += REPEAT_S / 2
        signal.raise_signal(number)
        assert stop.requested


def test_ctrl_c_some_time_later_stops_at_once(clock: list[float]) -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        clock[0] += REPEAT_S + 1
        signal.raise_signal(signal.SIGTERM)  # a scheduler that repeats itself may not cost the checkpoint
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    with StopSignal():
        assert [signal.getsignal(number) for number in interrupts.SIGNALS] != before
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before

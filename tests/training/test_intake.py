"""The intake of samples: staleness, oversize, end of data, stalls; nothing is lost."""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from typing import Any

import pytest

from ajgrpo.errors import TrainingStalledError, WorkerDiedError
from ajgrpo.metrics import Metrics
from ajgrpo.training import intake as intake_module
from ajgrpo.training.intake import IntakeLimits, SampleIntake, StopRequested
from ajgrpo.training.progress import PromptLedger
from ajgrpo.types import GroupDone
from tests.helpers import make_sample

LIMITS = IntakeLimits(num_rows=1, token_budget=16, max_staleness=2, stall_timeout_s=60.0, num_prompts=None)


def make_intake(
    items: list[Any], stop: bool = False, error: Exception | None = None, **limits: Any
) -> tuple[SampleIntake, PromptLedger, Metrics, list[int]]:
    ledger, metrics, taken = PromptLedger(), Metrics(), []
    samples: queue.Queue[Any] = queue.Queue()
    for item in items:
        samples.put(item)

    def check_health() -> None:
        if error is not None:
            raise error

    chosen = dataclasses.replace(LIMITS, **limits)
    intake = SampleIntake(samples, chosen, ledger, metrics, taken.append, check_health, lambda: stop)
    return intake, ledger, metrics, taken


def sample(prompt: int, length: int = 6, version: int = 0) -> Any:
    tokens = [prompt * 20 + i for i in range(length)]
    return make_sample(tokens, group_id=prompt, model_version=version, queued_at=time.monotonic())


def test_a_sample_that_does_not_fit_opens_the_next_micro_batch() -> None:
    intake, _, _, taken = make_intake([sample(i) for i in range(4)])
    rows, _ = intake.next_micro_batch(version=0)
    assert [s.prompt_index for s in rows[0].samples] == [0, 1]
    assert taken == [6, 6, 6]


def test_the_end_of_the_data_hands_out_what_is_left() -> None:
    items: list[Any] = []
    for i in range(3):
        items += [sample(i), GroupDone(i, 1)]
    intake, ledger, _, _ = make_intake(items, num_prompts=3)
    seen = []
    while rows := intake.next_micro_batch(version=0)[0]:
        seen += [s.prompt_index for row in rows for s in row.samples]
    assert seen == [0, 1, 2]
    assert ledger.num_announced == 3
    assert ledger.num_done == 0  # the trainer resolves what it trained


def test_stale_and_oversize_samples_are_counted_and_resolved() -> None:
    items = [sample(0, version=0), GroupDone(0, 1), sample(1, length=17, version=3), GroupDone(1, 1)]
    items += [sample(2, version=1), GroupDone(2, 1)]
    intake, ledger, metrics, _ = make_intake(items, num_prompts=3)
    rows, _ = intake.next_micro_batch(version=3)
    assert [s.prompt_index for s in rows[0].samples] == [2]
    reduced = metrics.reduce()
    assert reduced["sample/dropped_stale_count"] == 1
    assert reduced["batch/dropped_oversize_count"] == 1
    assert reduced["sample/staleness_max"] == 2
    assert ledger.num_done == 2


def test_a_held_over_sample_can_become_stale() -> None:
    later = [sample(3, version=4), sample(4, version=4)]
    intake, _, metrics, taken = make_intake([sample(0), sample(1), sample(2), *later])
    intake.next_micro_batch(version=0)
    with pytest.raises(StopRequested):
        intake._stop_requested = lambda: True
        intake.next_micro_batch(version=4)
    assert metrics.reduce()["sample/dropped_stale_count"] == 1
    assert taken == [6, 6, 6]


def test_a_request_to_stop_ends_the_wait() -> None:
    intake, *_ = make_intake([], stop=True)
    with pytest.raises(StopRequested):
        intake.next_micro_batch(version=0)


def test_a_dead_worker_is_noticed() -> None:
    intake, *_ = make_intake([], error=WorkerDiedError("boom"))
    with pytest.raises(WorkerDiedError, match="boom"):
        intake.next_micro_batch(version=0)


def test_a_stall_says_what_arrived_instead() -> None:
    intake, *_ = make_intake([GroupDone(0, 0), GroupDone(1, 0), sample(2)], stall_timeout_s=0.01)
    with pytest.raises(TrainingStalledError, match=r"rollout_stall_timeout=0.01.*2 groups without a trainable sample"):
        intake.next_micro_batch(version=9)


def test_a_long_wait_is_reported_with_what_arrived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(intake_module, "REPORT_INTERVAL_S", 0.0)
    intake, *_ = make_intake([GroupDone(0, 0), GroupDone(1, 0)], error=WorkerDiedError("at the end of the queue"))
    with caplog.at_level(logging.INFO, "ajgrpo"), pytest.raises(WorkerDiedError):
        intake.next_micro_batch(version=0)
    assert len(caplog.messages) == 2
    assert "no trainable sample for 0 s; what did arrive: 2 groups without a trainable" in caplog.messages[1]


def test_a_short_wait_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    intake, *_ = make_intake([GroupDone(0, 0), sample(1), sample(2), sample(3)])
    with caplog.at_level(logging.INFO, "ajgrpo"):
        intake.next_micro_batch(version=0)
    assert caplog.messages == []


def test_an_oversize_sample_is_named_with_its_length_and_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    intake, *_ = make_intake([sample(7, length=17), sample(8), GroupDone(7, 1), GroupDone(8, 1)], num_prompts=2)
    rows, _ = intake.next_micro_batch(version=0)
    assert [s.prompt_index for s in rows[0].samples] == [8]
    assert caplog.messages == [
        "dropped 1 samples that no row holds, the last of 17 tokens and 16 loss terms (prompt of dataset row 7): a row "
        "holds at most token_budget=16 of each; raise it"
    ]


def test_many_oversize_samples_are_reported_once_and_end_the_run_when_nothing_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = intake_module.MAX_OVERSIZE_IN_A_ROW
    items = (
        [sample(i, length=17) for i in range(count - 1)] + [sample(0)] + [sample(i, length=17) for i in range(count)]
    )
    intake, _, metrics, _ = make_intake(items)
    with pytest.raises(TrainingStalledError, match=rf"{count} samples in a row were longer than token_budget=16"):
        intake.next_micro_batch(version=0)
    assert metrics.reduce()["batch/dropped_oversize_count"] == 2 * count - 2
    assert len(caplog.messages) == 1

"""The trainer's end of the rollout queue: samples in, rows of one micro-batch out.

    rollout queue ──▶ stale? too long? ──▶ MicroBatchPlanner ──▶ rows
                          └──▶ dropped, counted, resolved in the ledger

Invariants: every sample taken is either in the rows handed out, held over for the next micro-batch, or counted as
dropped; no wait passes without looking at the worker's health, the stall bound and the request to stop.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import time
from collections import Counter
from collections.abc import Callable

from ajgrpo.errors import TrainingStalledError
from ajgrpo.metrics import Metrics
from ajgrpo.packing.planner import MicroBatchPlanner, Placement, Row
from ajgrpo.rollout.api import QueueLike
from ajgrpo.training.progress import PromptLedger
from ajgrpo.types import GroupDone, RolloutSample

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How long one look into the queue waits before health and stop requests are looked at again."""

REPORT_INTERVAL_S = 30.0
"""How often a wait in which nothing trainable arrives is reported."""

MAX_OVERSIZE_IN_A_ROW = 256
"""Oversize samples, with none between them that fits, after which nothing can be expected to fit."""


class StopRequested(Exception):
    """Training was asked to stop while the trainer waited for samples."""


@dataclasses.dataclass(frozen=True)
class IntakeLimits:
    """Bounds of the intake.

    Attributes:
        num_rows: rows of a micro-batch.
        token_budget: most unique tokens, and most loss terms, of a row.
        max_staleness: weight updates that a sample may lag behind.
        stall_timeout_s: how long no trainable sample may arrive.
        num_prompts: prompts after which the data is at its end; None: no end.
    """

    num_rows: int
    token_budget: int
    max_staleness: int
    stall_timeout_s: float
    num_prompts: int | None = None


class SampleIntake:
    """Takes samples from the worker and packs them into micro-batches.

    Args:
        samples: the rollout queue.
        limits: see ``IntakeLimits``.
        ledger: learns which prompts are done.
        metrics: gets ``sample/*`` and ``batch/dropped_oversize_count``.
        on_taken: called with each taken sample's number of tokens (frees the worker's allowance).
        check_health: called while waiting; raises when no more samples can be expected.
        stop_requested: looked at while waiting.
    """

    def __init__(
        self,
        samples: QueueLike,
        limits: IntakeLimits,
        ledger: PromptLedger,
        metrics: Metrics,
        on_taken: Callable[[int], None],
        check_health: Callable[[], None],
        stop_requested: Callable[[], bool],
    ):
        self._samples, self._limits, self._ledger, self._metrics = samples, limits, ledger, metrics
        self._on_taken, self._check_health, self._stop_requested = on_taken, check_health, stop_requested
        self._held_over: RolloutSample | None = None
        self._last_useful = self._last_report = time.monotonic()
        self._fruitless: Counter[str] = Counter()
        self._oversize_in_a_row = self._oversize_unreported = 0
        self._last_oversize_report = -math.inf

    @property
    def at_end(self) -> bool:
        """Whether no further sample will come: every prompt's group has been announced."""
        return self._limits.num_prompts is not None and self._ledger.num_announced >= self._limits.num_prompts

    def next_micro_batch(self, version: int) -> tuple[list[Row], float]:
        """Fills one micro-batch.

        Args:
            version: the policy version that the samples will be compared with.

        Returns:
            The rows (an empty list at the end of the data), and the seconds spent waiting for samples.

        Raises:
            StopRequested: while waiting.
            TrainingStalledError: no trainable sample within the bound, with the reason.
            AjgrpoError: what ``check_health`` raises.
        """
        planner = MicroBatchPlanner(self._limits.num_rows, self._limits.token_budget)
        waited = 0.0
        self._last_useful = self._last_report = time.monotonic()
        while True:
            start = time.monotonic()
            sample = self._next_sample()
            waited += time.monotonic() - start
            if sample is None:
                planner.finish()
                rows = planner.rows
                return (rows if any(row.samples for row in rows) else []), waited
            if self._is_stale(sample, version):
                continue
            placement = planner.add(sample)
            if placement is Placement.FULL:
                self._held_over = sample
                return planner.rows, waited
            if placement is Placement.OVERSIZE:
                self._drop_oversize(sample)
                continue
            self._note_useful(sample, version)

    def _next_sample(self) -> RolloutSample | None:
        """The next sample, None at the end of the data."""
        if self._held_over is not None:
            sample, self._held_over = self._held_over, None
            return sample
        while True:
            if self._stop_requested():
                raise StopRequested
            try:
                item = self._samples.get(timeout=POLL_S)
            except queue.Empty:
                if self.at_end:
                    return None
                self._check_health()
                self._check_stalled()
                continue
            if isinstance(item, GroupDone):
                self._ledger.announce(item.prompt_index, item.num_samples)
                if item.num_samples == 0:
                    self._fruitless["groups without a trainable sample (equal rewards, failures or filtered)"] += 1
                    self._check_stalled()
                if self.at_end:
                    return None
                continue
            self._on_taken(item.num_tokens)
            return item

    def _is_stale(self, sample: RolloutSample, version: int) -> bool:
        if version - sample.model_version <= self._limits.max_staleness:
            return False
        self._drop(sample, "sample/dropped_stale_count", f"older than max_staleness={self._limits.max_staleness}")
        return True

    def _drop_oversize(self, sample: RolloutSample) -> None:
        budget, now = self._limits.token_budget, time.monotonic()
        self._oversize_in_a_row += 1
        self._oversize_unreported += 1
        if now - self._last_oversize_report >= REPORT_INTERVAL_S:
            logger.warning(
                "dropped %d samples that no row holds, the last of %d tokens and %d loss terms (prompt of dataset row "
                "%d): a row holds at most token_budget=%d of each; raise it",
                *(self._oversize_unreported, sample.num_tokens, sample.num_trained, sample.row_index, budget),
            )
            self._oversize_unreported, self._last_oversize_report = 0, now
        if self._oversize_in_a_row >= MAX_OVERSIZE_IN_A_ROW:
            raise TrainingStalledError(
                f"{self._oversize_in_a_row} samples in a row were longer than token_budget={budget}, the last with "
                f"{sample.num_tokens} tokens; raise it, or lower max_completion_length"
            )
        self._drop(sample, "batch/dropped_oversize_count", f"longer than token_budget={budget}")

    def _drop(self, sample: RolloutSample, counter: str, reason: str) -> None:
        self._metrics.add(counter, 1)
        self._ledger.resolve(sample.prompt_index)
        self._fruitless[f"samples {reason}"] += 1
        self._check_stalled()

    def _note_useful(self, sample: RolloutSample, version: int) -> None:
        self._last_useful = self._last_report = time.monotonic()
        self._fruitless.clear()
        self._oversize_in_a_row = 0
        metrics = self._metrics
        for reduced in ("mean", "max"):
            metrics.add(f"sample/forwarded_tokens_{reduced}", sample.num_tokens)
            metrics.add(f"sample/staleness_{reduced}", version - sample.model_version)
        metrics.add("sample/trained_tokens_mean", sample.num_trained)
        metrics.add("sample/time_in_queue_s", time.monotonic() - sample.queued_at)

    def _check_stalled(self) -> None:
        """Reports a wait in which nothing trainable arrives now and then, and ends it at its bound."""
        now = time.monotonic()
        silent = now - self._last_useful
        seen = "; ".join(f"{count} {reason}" for reason, count in self._fruitless.items()) or "nothing at all"
        if silent > self._limits.stall_timeout_s:
            raise TrainingStalledError(
                f"no trainable sample arrived for {silent:.0f} s (rollout_stall_timeout="
                f"{self._limits.stall_timeout_s}); what did arrive: {seen}"
            )
        if now - self._last_report >= REPORT_INTERVAL_S:
            self._last_report = now
            logger.info("no trainable sample for %.0f s; what did arrive: %s", silent, seen)

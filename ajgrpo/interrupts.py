"""Ctrl-C and SIGTERM as a request: the step under way is finished, the state saved, every process stopped."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


REPEAT_S = 2.0
"""Signals within this time count as one: a launcher may pass on what the terminal has sent to every process already."""


class StopSignal:
    """While entered, SIGINT or SIGTERM sets ``requested``; a SIGINT more than ``REPEAT_S`` later raises
    KeyboardInterrupt at once. SIGTERM never does: who wants no checkpoint has SIGKILL.

    Outside the main thread Python delivers no signals, and this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._requested_at = True, now
            logger.warning(
                "stopping after this step and saving; to stop at once without saving, press Ctrl-C after %g s", REPEAT_S
            )
        elif number == signal.SIGINT and now - self._requested_at > REPEAT_S:
            raise KeyboardInterrupt

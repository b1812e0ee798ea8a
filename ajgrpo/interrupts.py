"""Ctrl-C and SIGTERM as a request: the step under way is finished, the state saved, every process stopped."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """While entered, the first SIGINT or SIGTERM sets ``requested``; a second one raises KeyboardInterrupt at once.

    Outside the main thread Python delivers no signals, and this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
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
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this step and saving; interrupt again to stop at once without saving")

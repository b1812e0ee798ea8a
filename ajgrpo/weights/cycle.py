"""The cycle of a weight push, whatever carries the bytes: pause, start, update, finish, resume, under one deadline.

The cycle runs in the caller's thread. ``update`` is a transport's own: it posts ``/update_weights`` and waits for the
reply while a thread of its own moves the bytes, so an error of the server ends the push at once and with the server's
own text. A failed push leaves the session open, and the server paused: ``resume`` then refuses (the weights may be half
new), and the next ``send`` repairs: it connects anew, closes the old session and sends everything again. A server with
several workers can be repaired only when its session is known to be open: a call that fails there leaves replies behind
inside vLLM that later calls would read.

Left out: the transports (``host``, ``nccl``).
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ajgrpo.errors import ServerError, ServerResponseError, WeightTransferError
from ajgrpo.inference.client import ControlClient
from ajgrpo.weights.base import TensorSpec

logger = logging.getLogger(__name__)

ALREADY_ACTIVE = "already active"
"""Part of the message of a server whose weight update is open."""

T = TypeVar("T")


class PushCycle(abc.ABC):
    """Pushes weights to the server named by ``control``. Implements ``weights.base.WeightTransfer``.

    The n-th successful ``send`` labels the weights ``str(n - 1)``: the first push is version ``"0"``.

    Args:
        control: client of the server.
        manifest: every tensor, in the order in which ``send`` gets them.
        deadline_s: bound on a whole push, from ``pause`` to ``resume``.

    Attributes:
        world_size: workers of the server.
        phase_seconds: how long each phase of the last push took.

    Raises:
        WeightTransferError: from every method but ``destroy``, with the phase's name.
    """

    def __init__(self, control: ControlClient, manifest: Sequence[TensorSpec], *, deadline_s: float):
        self._control, self._manifest, self._deadline_s = control, tuple(manifest), deadline_s
        self.phase_seconds: dict[str, float] = {}
        self.world_size = 1
        self._num_sent = 0
        self._deadline: float | None = None
        self._session_open = False
        self._must_repair = False

    @abc.abstractmethod
    def _connect(self) -> None:
        """Readies the transport and posts its ``init_info``; lets go of an earlier connection first."""

    @abc.abstractmethod
    def _update(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        """Posts ``/update_weights`` and moves the bytes."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Lets go of everything on this side. The server is left as it is. May be called more than once."""

    def init(self) -> None:
        """Connects. A server found paused is repaired by the first ``send``."""
        self._begin()
        self.world_size = self._call("init", lambda left: self._control.world_size())
        self._must_repair = self._call("init", lambda left: self._control.is_paused(timeout_s=left))
        self._connect()
        self._deadline = None

    def pause(self) -> None:
        """Stops generation; requests in flight are kept. The push's deadline runs from here."""
        self._begin()
        self._call("pause", lambda left: self._control.pause(timeout_s=left))

    def send(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        """Sends all tensors and makes the server use them.

        Args:
            named_arrays: names and arrays (anything ``numpy.asarray`` takes) exactly as in the manifest.
        """
        if self._deadline is None:
            self._begin()
        if self._must_repair or self._session_open:
            self._repair()
        self._start()
        self._session_open = True
        self._update(named_arrays)
        self._call("finish", lambda left: self._control.finish_update(str(self._num_sent), timeout_s=left))
        self._session_open = False
        self._num_sent += 1

    def resume(self) -> None:
        """Goes on generating."""
        if self._session_open:
            raise WeightTransferError(
                "resume", "the last push did not finish, so the server's weights may be half new; push again first"
            )
        self._call("resume", lambda left: self._control.resume(timeout_s=left))
        self._deadline = None

    def _begin(self) -> None:
        self.phase_seconds = {}
        self._deadline = time.monotonic() + self._deadline_s

    def _left(self, phase: str) -> float:
        """Seconds until the deadline."""
        left = self._deadline_s if self._deadline is None else self._deadline - time.monotonic()
        if left <= 0:
            raise WeightTransferError(
                phase,
                f"the push took longer than {self._deadline_s:g} s (vllm_server_timeout): raise it",
            )
        return left

    def _call(self, phase: str, request: Callable[[float], T]) -> T:
        start = time.perf_counter()
        try:
            return request(self._left(phase))
        except ServerError as exc:
            raise WeightTransferError(phase, str(exc)) from exc
        finally:
            self.phase_seconds[phase] = time.perf_counter() - start

    def _start(self) -> None:
        try:
            self._call("start", lambda left: self._control.start_update(timeout_s=left))
        except WeightTransferError as exc:
            # Another trainer's session: killed in the middle, it did not leave the server paused as we came.
            if ALREADY_ACTIVE not in str(exc) or self.world_size > 1:
                raise
            self._session_open = True
            self._repair()
            self._call("start", lambda left: self._control.start_update(timeout_s=left))

    def _repair(self) -> None:
        """Brings a server that a broken push left behind to where a new one can start."""
        if self.world_size > 1 and not self._session_open:
            raise WeightTransferError(
                "start",
                f"the server was left paused by a push that did not end, and has {self.world_size} workers, which "
                "vLLM cannot bring back into step; restart the server",
            )
        self._connect()
        try:
            self._control.finish_update(timeout_s=self._left("start"))
        except ServerResponseError as exc:
            logger.info("no weight update was open: %s", exc)
        except ServerError as exc:
            raise WeightTransferError("start", str(exc)) from exc
        self._session_open = self._must_repair = False

"""The ``host`` transport: weights from the trainer's host memory, for servers without NCCL.

    trainer's thread                              sender thread                         server
    POST /start_weight_update ────────────────────────────────────────────────────────▶ opens a session
    POST /update_weights (waits for the reply) ───────────────────────────────────────▶ connects back
                                                  accept, check hello  ◀──────────────
                                                  chunk, chunk, …, DONE ──────────────▶ checks, loads
                                                  every worker's outcome ◀─────────────
         ◀──────────────────────────────────────────────────────────────────────────── reply
    POST /finish_weight_update (version) ─────────────────────────────────────────────▶ closes the session

The reply is what the caller waits on, so an error of the server ends the push at once and with the server's own text,
whatever the sender is doing. A failed push leaves the session open, and the server paused: ``resume`` then refuses
(the weights may be half new), and the next ``send`` repairs: it announces a new listener, closes the old session and
sends everything again. A server with several workers can be repaired only when its session is known to be open: a call
that fails there leaves replies behind inside vLLM that later calls would read.

Left out: several trainer hosts.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ajgrpo.errors import ServerError, ServerResponseError, WeightTransferError
from ajgrpo.inference.client import ControlClient
from ajgrpo.weights import base
from ajgrpo.weights.base import PeerClosedError, TensorSpec
from ajgrpo.weights.sender import Sender, SharedSlots

logger = logging.getLogger(__name__)

IO_TIMEOUT_S = 30.0
"""Longest time without progress on the socket; a healthy transfer is never silent for so long."""

REPORT_GRACE_S = 5.0
"""How long the workers' reports may take to be read once the server has answered."""

ALREADY_ACTIVE = "already active"
"""Part of the message of a server whose weight update is open."""

T = TypeVar("T")


class HostWeightTransfer:
    """Pushes weights to the server named by ``control``. Implements ``weights.base.WeightTransfer``.

    The n-th successful ``send`` labels the weights ``str(n - 1)``: the first push is version ``"0"``.

    Args:
        control: client of the server.
        manifest: every tensor, in the order in which ``send`` gets them.
        deadline_s: bound on a whole push, from ``pause`` to ``resume``.
        buffer_bytes: the buffer size of the chunk rule.
        io_timeout_s: bound on a silence, on both sides.
        address: what the server connects to; None: this host's address on the way to the server.
        shared_memory: pass the bytes through memory when every worker runs on this machine.

    Attributes:
        phase_seconds: how long each phase of the last push took.
        used_shared_memory: whether the last push went through memory.

    Raises:
        WeightTransferError: from every method but ``destroy``, with the phase's name.
    """

    def __init__(
        self,
        control: ControlClient,
        manifest: Sequence[TensorSpec],
        *,
        deadline_s: float,
        buffer_bytes: int = base.DEFAULT_BUFFER_BYTES,
        io_timeout_s: float = IO_TIMEOUT_S,
        address: str | None = None,
        shared_memory: bool = True,
    ):
        self._control, self._manifest, self._address = control, tuple(manifest), address
        self._deadline_s, self._buffer_bytes, self._io_timeout_s = deadline_s, buffer_bytes, io_timeout_s
        self._shared_memory = shared_memory and SharedSlots.available()
        self._slots: SharedSlots | None = None
        self._transfer_id = secrets.token_hex(8)
        self.phase_seconds: dict[str, float] = {}
        self.used_shared_memory = False
        self._world_size = 1
        self._num_sent = 0
        self._deadline: float | None = None
        self._session_open = False
        self._must_repair = False
        self._listener: socket.socket | None = None
        self._token = b""

    def init(self) -> None:
        """Opens the listener and tells the server about it. A server found paused is repaired by the first ``send``."""
        self._begin()
        self._world_size = self._call("init", lambda left: self._control.world_size())
        self._must_repair = self._call("init", lambda left: self._control.is_paused(timeout_s=left))
        self._announce()
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

    def destroy(self) -> None:
        """Closes the listener and lets go of the shared memory. The server is left as it is."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None

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

    def _announce(self) -> None:
        """Opens a new listener, with a new token, and tells the server."""
        self.destroy()
        address = self._address or local_address(self._control.base_url)
        self._token = secrets.token_bytes(base.TOKEN_BYTES)
        try:
            self._listener = socket.create_server((address, 0), backlog=max(16, self._world_size))
            if self._shared_memory:
                sizes = [spec.nbytes for spec in self._manifest]
                largest = max((chunk.nbytes for chunk in base.split_chunks(sizes, self._buffer_bytes)), default=0)
                self._slots = SharedSlots(largest, self._token)
        except OSError as exc:
            raise WeightTransferError("init", f"cannot listen on {address}: {exc}") from exc
        info = base.HostInitInfo(
            address=address,
            port=self._listener.getsockname()[1],
            token=self._token.hex(),
            transfer_id=self._transfer_id,
            packed_buffer_size_bytes=self._buffer_bytes,
            io_timeout_s=self._io_timeout_s,
            shared_pid=os.getpid(),
            shared_fd=self._slots.fd if self._slots is not None else -1,
            slot_bytes=self._slots.slot_bytes if self._slots is not None else 0,
        )
        self._call("init", lambda left: self._control.init_transfer(info.to_json(), timeout_s=left))

    def _start(self) -> None:
        try:
            self._call("start", lambda left: self._control.start_update(timeout_s=left))
        except WeightTransferError as exc:
            # Another trainer's session: killed in the middle, it did not leave the server paused as we came.
            if ALREADY_ACTIVE not in str(exc) or self._world_size > 1:
                raise
            self._session_open = True
            self._repair()
            self._call("start", lambda left: self._control.start_update(timeout_s=left))

    def _repair(self) -> None:
        """Brings a server that a broken push left behind to where a new one can start."""
        if self._world_size > 1 and not self._session_open:
            raise WeightTransferError(
                "start",
                f"the server was left paused by a push that did not end, and has {self._world_size} workers, which "
                "vLLM cannot bring back into step; restart the server",
            )
        self._announce()
        try:
            self._control.finish_update(timeout_s=self._left("start"))
        except ServerResponseError as exc:
            logger.info("no weight update was open: %s", exc)
        except ServerError as exc:
            raise WeightTransferError("start", str(exc)) from exc
        self._session_open = self._must_repair = False

    def _update(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        assert self._listener is not None and self._deadline is not None, "init() comes first"
        sender = Sender(
            self._listener,
            self._token,
            self._manifest,
            self._world_size,
            self._buffer_bytes,
            self._io_timeout_s,
            self._slots,
        )
        info = base.manifest_to_json(self._manifest) | {"transfer_id": self._transfer_id}
        with ThreadPoolExecutor(1, thread_name_prefix="ajgrpo-weights") as pool:
            sending = pool.submit(sender.run, named_arrays, self._deadline)
            try:
                self._call("update", lambda left: self._control.update_weights(info, timeout_s=left))
                # What the workers have to say was sent before the reply.
                futures.wait([sending], timeout=REPORT_GRACE_S)
            except WeightTransferError:
                sender.stop()
                error = sending.exception()
                # A broken connection only mirrors what the server says; anything else is the cause.
                if error is None or isinstance(error, OSError | PeerClosedError):
                    raise
                raise WeightTransferError("update", str(error)) from error
            finally:
                sender.stop()
            if (error := sending.exception()) is not None:
                raise WeightTransferError("update", f"the server answered, yet the transfer failed: {error}") from error
        self.used_shared_memory = sender.used_shared_memory


def local_address(base_url: str) -> str:
    """This host's address as seen on the way to the server; no packet is sent.

    Raises:
        WeightTransferError: the server's host name is unknown.
    """
    parts = urlsplit(base_url)
    host, port = parts.hostname or "localhost", parts.port or 80
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError as exc:
        raise WeightTransferError("init", f"no way to the server's host {host!r}: {exc}") from exc
    return "127.0.0.1" if ipaddress.ip_address(address.split("%")[0]).is_loopback else address

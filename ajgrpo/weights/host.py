"""The ``host`` transport: weights over TCP from the trainer's host memory, for servers without NCCL.

    trainer's thread                              sender thread                         server
    POST /start_weight_update ────────────────────────────────────────────────────────▶ opens a session
    POST /update_weights (waits for the reply) ───────────────────────────────────────▶ connects back
                                                  accept, check hello  ◀──────────────
                                                  chunk, chunk, …, DONE ──────────────▶ checks, stages
         ◀──────────────────────────────────────────────────────────────────────────── reply
    POST /finish_weight_update (version) ─────────────────────────────────────────────▶ swaps the weights in

The reply is what the caller waits on, so an error of the server ends the push at once and with the server's own text,
whatever the sender is doing. A failed push leaves the session open, and the server paused: ``resume`` then refuses
(generating inside an open session is fatal to vLLM), and the next ``send`` repairs: it announces a new listener, closes
the old session and sends everything again.

Left out: several trainer hosts; shared memory.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from ajgrpo.errors import ServerError, ServerResponseError, WeightTransferError
from ajgrpo.inference.client import ControlClient
from ajgrpo.weights import base
from ajgrpo.weights.base import TensorSpec, TransferError

IO_TIMEOUT_S = 30.0
"""Longest time without progress on the socket; a healthy transfer is never silent for so long."""

_POLL_S = 0.1

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
    ):
        self._control, self._manifest, self._address = control, tuple(manifest), address
        self._deadline_s, self._buffer_bytes, self._io_timeout_s = deadline_s, buffer_bytes, io_timeout_s
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
        self._call("start", lambda left: self._control.start_update(timeout_s=left))
        self._session_open = True
        self._update(named_arrays)
        self._call("finish", lambda left: self._control.finish_update(str(self._num_sent), timeout_s=left))
        self._session_open = False
        self._num_sent += 1

    def resume(self) -> None:
        """Goes on generating."""
        if self._session_open:
            raise WeightTransferError(
                "resume", "the last push did not finish, and resuming now would end the server; push again first"
            )
        self._call("resume", lambda left: self._control.resume(timeout_s=left))
        self._deadline = None

    def destroy(self) -> None:
        """Closes the listener. The server is left as it is."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _begin(self) -> None:
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
        try:
            return request(self._left(phase))
        except ServerError as exc:
            raise WeightTransferError(phase, str(exc)) from exc

    def _announce(self) -> None:
        """Opens a new listener, with a new token, and tells the server."""
        self.destroy()
        address = self._address or local_address(self._control.base_url)
        self._token = secrets.token_bytes(base.TOKEN_BYTES)
        try:
            self._listener = socket.create_server((address, 0), backlog=max(16, self._world_size))
        except OSError as exc:
            raise WeightTransferError("init", f"cannot listen on {address}: {exc}") from exc
        info = base.HostInitInfo(
            address=address,
            port=self._listener.getsockname()[1],
            token=self._token.hex(),
            packed_buffer_size_bytes=self._buffer_bytes,
            io_timeout_s=self._io_timeout_s,
        )
        self._call("init", lambda left: self._control.init_transfer(info.to_json(), timeout_s=left))

    def _repair(self) -> None:
        """Brings a server that a broken push left behind to where a new one can start."""
        self._announce()
        try:
            self._control.finish_update(timeout_s=self._left("start"))
        except ServerResponseError:
            pass  # there was no open session
        except ServerError as exc:
            raise WeightTransferError("start", str(exc)) from exc
        self._session_open = self._must_repair = False

    def _update(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        assert self._listener is not None and self._deadline is not None, "init() comes first"
        sender = _Sender(
            self._listener, self._token, self._manifest, self._world_size, self._buffer_bytes, self._io_timeout_s
        )
        with ThreadPoolExecutor(1, thread_name_prefix="ajgrpo-weights") as pool:
            sending = pool.submit(sender.run, named_arrays, self._deadline)
            try:
                info = base.manifest_to_json(self._manifest)
                self._control.update_weights(info, timeout_s=self._left("update"))
            except ServerError as exc:
                sender.stop()
                error = sending.exception()
                # A socket error of the sender only mirrors what the server says; anything else is the cause.
                own = error is not None and not isinstance(error, OSError)
                raise WeightTransferError("update", str(error if own else exc)) from (error if own else exc)
            finally:
                sender.stop()
            error = sending.exception()
        if error is not None:
            raise WeightTransferError("update", str(error)) from error


class _Sender:
    """One transfer: accepts the workers, sends them all the tensors. ``run`` in one thread, ``stop`` from another."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        manifest: Sequence[TensorSpec],
        world_size: int,
        buffer_bytes: int,
        io_timeout_s: float,
    ):
        self._listener, self._token, self._manifest = listener, token, manifest
        self._world_size, self._buffer_bytes, self._io_timeout_s = world_size, buffer_bytes, io_timeout_s
        self._connections: list[socket.socket] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def run(self, named_arrays: Iterable[tuple[str, Any]], deadline: float) -> None:
        """Returns when all is sent or ``stop`` was called; on an error tells the workers, then raises it."""
        finished = False
        try:
            while len(self._connections) < self._world_size and not self._stopping.is_set():
                self._accept(deadline)
            if not self._stopping.is_set():
                self._send_all(named_arrays)
            finished = True
        finally:
            if not finished:
                self._abort()
            self._close()

    def stop(self) -> None:
        """Ends ``run`` soon: wakes it from whatever socket operation it is in."""
        self._stopping.set()
        with self._lock:
            for connection in self._connections:
                _shut_down(connection)

    def _accept(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not connect in time")
        self._listener.settimeout(_POLL_S)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        connection.settimeout(self._io_timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = bytearray(base.HELLO.size)
        try:
            base.receive_exactly(connection, memoryview(hello))
        except (OSError, TransferError):
            connection.close()  # a stray connection, or a worker that gave up
            return
        magic, _, token = base.HELLO.unpack(hello)
        if magic != base.MAGIC or not secrets.compare_digest(token, self._token):
            connection.close()
            return
        with self._lock:
            self._connections.append(connection)

    def _send_all(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        tensors = iter(named_arrays)
        sizes = [spec.nbytes for spec in self._manifest]
        for chunk in base.split_chunks(sizes, self._buffer_bytes):
            self._send(base.FRAME.pack(base.CHUNK, chunk.nbytes))
            for spec in self._manifest[chunk.start : chunk.stop]:
                self._send(tensor_bytes(spec, next(tensors, None)))
        if (extra := next(tensors, None)) is not None:
            raise TransferError(f"tensor {extra[0]!r} comes after the end of the manifest")
        self._send(base.FRAME.pack(base.DONE, sum(sizes)))

    def _send(self, data: bytes | memoryview) -> None:
        for connection in self._connections:
            connection.sendall(data)

    def _abort(self) -> None:
        # Inside a chunk the frame is read as data; then closing the connection is what tells the worker.
        for connection in self._connections:
            try:
                connection.sendall(base.FRAME.pack(base.ABORT, 0))
            except OSError:
                continue

    def _close(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()


def tensor_bytes(spec: TensorSpec, item: tuple[str, Any] | None) -> memoryview:
    """The row-major bytes of the tensor that must match ``spec``; raises TransferError when it does not."""
    if item is None:
        raise TransferError(f"the tensors end before {spec.name!r} of the manifest")
    name, array = item[0], np.asarray(item[1])
    got = TensorSpec(name, array.shape, array.dtype.name)
    if got != spec:
        raise TransferError(f"the manifest says {spec}, the trainer's next tensor is {got}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was quicker

"""The trainer's side of one host transfer: accepts the server's workers and sends them all the tensors.

Workers on this machine get the bytes through shared memory, the others over their connections; ``weights.base`` holds
the format. Shared memory is used only when every worker can open it, so that the data are laid out once.

Left out: the HTTP cycle around a transfer (``weights.host``).
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ajgrpo.weights import base
from ajgrpo.weights.base import Chunk, TensorSpec, TransferError

STRIP_BYTES = 32
"""Fastest of those tried (16 to 256) for a 1024 × 3072 matrix on an x86 server."""

_POLL_S = 0.1


class SharedSlots:
    """The trainer's shared memory: the token, then ``base.NUM_SLOTS`` slots for chunks.

    It has no name in any file system; it is gone when its last user is.

    Args:
        slot_bytes: size of a slot, at least that of the largest chunk.
        token: written at the start, so that a worker can tell it from another process's memory.
    """

    def __init__(self, slot_bytes: int, token: bytes):
        self.slot_bytes = slot_bytes
        size = base.SLOTS_OFFSET + base.NUM_SLOTS * slot_bytes
        self.fd = os.memfd_create("ajgrpo-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._map: mmap.mmap | None = mmap.mmap(self.fd, size)
        self._map[: len(token)] = token

    @staticmethod
    def available() -> bool:
        """Whether this system has anonymous files that another process can open."""
        return sys.platform == "linux"

    def slot(self, number: int, nbytes: int) -> np.ndarray:
        """The first ``nbytes`` of the slot of chunk ``number``, uint8."""
        assert self._map is not None, "closed"
        offset = base.SLOTS_OFFSET + number % base.NUM_SLOTS * self.slot_bytes
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Lets go of the memory. May be called more than once."""
        if self._map is not None:
            os.close(self.fd)
            self._map = None  # an array over it, in a traceback for example, may outlive this


@dataclasses.dataclass
class _Worker:
    """A connected worker: its rank, whether it sees the shared memory, and how many chunks it has taken from there."""

    connection: socket.socket
    rank: int
    shared: bool
    taken: int = 0

    def await_taken(self, count: int) -> None:
        """Returns once ``count`` chunks are taken."""
        while self.taken < count:
            self.read_frame()

    def read_frame(self) -> bool:
        """Reads one frame; True when the worker is done. Raises TransferError with the worker's own text."""
        try:
            kind, _ = base.receive_frame(self.connection)
        except base.PeerClosedError:
            raise
        except TransferError as exc:
            raise TransferError(f"server worker {self.rank}: {exc}") from exc
        if kind not in (base.TAKEN, base.OKAY):
            raise TransferError(f"server worker {self.rank} answered {kind!r}")
        self.taken += kind == base.TAKEN
        return kind == base.OKAY


class Sender:
    """One transfer. ``run`` in one thread, ``stop`` from another.

    Args:
        listener: where the workers connect.
        token: what they must show.
        manifest: the tensors in order.
        world_size: number of workers.
        buffer_bytes: of the chunk rule.
        io_timeout_s: bound on a silence.
        slots: shared memory, or None to send over the connections only.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        manifest: Sequence[TensorSpec],
        world_size: int,
        buffer_bytes: int,
        io_timeout_s: float,
        slots: SharedSlots | None = None,
    ):
        self._listener, self._token, self._manifest, self._slots = listener, token, manifest, slots
        self._world_size, self._buffer_bytes, self._io_timeout_s = world_size, buffer_bytes, io_timeout_s
        self._workers: list[_Worker] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.used_shared_memory = False

    def run(self, named_arrays: Iterable[tuple[str, Any]], deadline: float) -> None:
        """Returns when every worker has reported success; on an error tells the workers, then raises it.

        Raises:
            TransferError: stopped early, a worker failed, or the tensors are not those of the manifest.
            OSError: a connection broke or nobody connected.
        """
        finished = False
        try:
            while len(self._workers) < self._world_size:
                self._accept(deadline)
            self._send_all(named_arrays)
            for worker in self._workers:
                # Loading has no bound of its own: it counts against the whole push.
                worker.connection.settimeout(max(deadline - time.monotonic(), _POLL_S))
                while not worker.read_frame():
                    pass
            finished = True
        finally:
            if not finished:
                self._abort()
            self._close()

    def stop(self) -> None:
        """Ends ``run`` soon: wakes it from whatever socket operation it is in."""
        self._stopping.set()
        with self._lock:
            for worker in self._workers:
                _shut_down(worker.connection)

    def _accept(self, deadline: float) -> None:
        connected = f"only {len(self._workers)} of {self._world_size} server workers connected"
        if self._stopping.is_set():
            raise base.PeerClosedError(f"{connected}; is another trainer using the server?")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{connected} in time; can they reach this host?")
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
        magic, rank, token, shared = base.HELLO.unpack(hello)
        if magic != base.MAGIC or not secrets.compare_digest(token, self._token):
            connection.close()
            return
        with self._lock:
            self._workers.append(_Worker(connection, rank, shared))

    def _send_all(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        slots = self._slots if all(worker.shared for worker in self._workers) else None
        self.used_shared_memory = slots is not None
        tensors = _ahead(iter(named_arrays))
        sizes = [spec.nbytes for spec in self._manifest]
        for number, chunk in enumerate(base.split_chunks(sizes, self._buffer_bytes)):
            self._notice_failures()
            if slots is None:
                self._send_chunk(chunk, tensors)
            else:
                self._share_chunk(slots, number, chunk, tensors)
        if (extra := next(tensors, None)) is not None:
            raise TransferError(f"tensor {extra[0]!r} comes after the end of the manifest")
        self._send(base.FRAME.pack(base.DONE, sum(sizes)))

    def _send_chunk(self, chunk: Chunk, tensors: Iterator[tuple[str, Any]]) -> None:
        self._send(base.FRAME.pack(base.CHUNK, chunk.nbytes))
        for spec in self._manifest[chunk.start : chunk.stop]:
            array = tensor_array(spec, next(tensors, None))
            if not array.flags.c_contiguous:
                array = copy_row_major(array, np.empty(array.shape, array.dtype))
            self._send(array.reshape(-1).view(np.uint8).data)

    def _share_chunk(self, slots: SharedSlots, number: int, chunk: Chunk, tensors: Iterator[tuple[str, Any]]) -> None:
        for worker in self._workers:
            worker.await_taken(number - base.NUM_SLOTS + 1)
        target, offset = slots.slot(number, chunk.nbytes), 0
        for spec in self._manifest[chunk.start : chunk.stop]:
            array = tensor_array(spec, next(tensors, None))
            place = target[offset : offset + spec.nbytes].view(array.dtype).reshape(spec.shape)
            copy_row_major(array, place)
            offset += spec.nbytes
        self._send(base.FRAME.pack(base.SHARED_CHUNK, chunk.nbytes))

    def _notice_failures(self) -> None:
        """Reads what workers have said, without waiting."""
        by_socket = {worker.connection: worker for worker in self._workers}
        while ready := select.select(list(by_socket), [], [], 0)[0]:
            for connection in ready:
                by_socket[connection].read_frame()

    def _send(self, data: bytes | memoryview) -> None:
        for worker in self._workers:
            worker.connection.sendall(data)

    def _abort(self) -> None:
        # Inside a chunk the frame is read as data; then closing the connection is what tells the worker.
        for worker in self._workers:
            try:
                worker.connection.sendall(base.FRAME.pack(base.ABORT, 0))
            except OSError:
                continue

    def _close(self) -> None:
        with self._lock:
            for worker in self._workers:
                worker.connection.close()
            self._workers.clear()


def tensor_array(spec: TensorSpec, item: tuple[str, Any] | None) -> np.ndarray:
    """The array that must match ``spec``; raises TransferError when it does not."""
    if item is None:
        raise TransferError(f"the tensors end before {spec.name!r} of the manifest")
    name, array = item[0], np.asarray(item[1])
    got = TensorSpec(name, array.shape, array.dtype.name)
    if got != spec:
        raise TransferError(f"the manifest says {spec}, the trainer's next tensor is {got}")
    return array


def copy_row_major(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Copies into a row-major array of the same shape and dtype, which is returned.

    A transposed matrix is copied in strips of few columns: its whole rows would touch a cache line for each element.
    """
    if source.ndim == 2 and source.flags.f_contiguous and not source.flags.c_contiguous:
        width = STRIP_BYTES // source.dtype.itemsize
        for start in range(0, source.shape[1], width):
            target[:, start : start + width] = source[:, start : start + width]
    else:
        np.copyto(target, source)
    return target


def _ahead(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same items, each asked for one early: JAX computes the next tensor while this one is copied."""
    held: list[tuple[str, Any]] = []
    for item in tensors:
        held.append(item)
        if len(held) > 1:
            yield held.pop(0)
    yield from held


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was quicker

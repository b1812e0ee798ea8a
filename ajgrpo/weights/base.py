"""What a weight push is made of: the protocol of a transfer, the manifest, and the bytes of the host transport.

    trainer (listens)                                      server worker (connects once per update_weights)
        ◀── HELLO  magic, rank, token, shared ──────────────
        ─── FRAME "CHNK" nbytes, then nbytes of data ──────▶   once for each chunk, in manifest order
        ─── FRAME "SHMC" nbytes (the data lie in memory) ──▶   instead, when both share a machine
        ◀── FRAME "TAKN" nbytes ────────────────────────────   the worker has copied that chunk
        ─── FRAME "DONE" total bytes ──────────────────────▶
        ◀── FRAME "OKAY" 0 ─────────────────────────────────   the model has the new weights
        ◀── FRAME "FAIL" nbytes, then text ─────────────────   instead of any frame: the worker's error
        ─── FRAME "ABRT" 0 ────────────────────────────────▶   instead of any frame: the trainer gave up

A chunk is the row-major bytes of consecutive tensors, and closes as soon as it is larger than the buffer size (vLLM's
packed rule), so both sides find the same boundaries from the manifest alone, and a manifest on which they disagree
shows as a chunk of the wrong size. The outcome of every worker comes back on its own connection: with several workers
the HTTP reply of vLLM cannot be relied on for it.

Shared memory is an anonymous file of the trainer that workers open through ``/proc``: nothing is left behind however
either side ends. A worker that cannot open it (another machine, another container) says so in its hello, and gets the
bytes over the connection. The file holds the token, then two slots that chunks use in turn.

The module needs NumPy only: it also runs inside a vLLM worker.

Left out: how a side obtains or uses the tensors (``hf.mapping``, the server's engine).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

BACKEND = "host"
"""The name of the host transport in ``--weight-transfer-config`` and in ``/server_info``."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes that may travel, with their size."""

DEFAULT_BUFFER_BYTES = 256 * 1024 * 1024
MAGIC = b"AJG2"
HELLO = struct.Struct("<4sI16s?")
FRAME = struct.Struct("<4sQ")
CHUNK, SHARED_CHUNK, DONE, ABORT = b"CHNK", b"SHMC", b"DONE", b"ABRT"
TAKEN, OKAY, FAILED = b"TAKN", b"OKAY", b"FAIL"
TOKEN_BYTES = 16
NUM_SLOTS = 2
SLOTS_OFFSET = 4096
"""Where the slots begin in shared memory; the token stands before them."""

_RECEIVE_BYTES = 1 << 22
_MAX_ERROR_BYTES = 1 << 16


class WeightTransfer(Protocol):
    """How new weights reach the server. A cycle is ``pause``, ``send``, ``resume``; errors are WeightTransferError."""

    def init(self) -> None:
        """Connects the two sides, once, before the first cycle."""

    def pause(self) -> None:
        """Stops generation; requests in flight are kept."""

    def send(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        """Sends all tensors, named and shaped as in the checkpoint, in the order of the manifest."""

    def resume(self) -> None:
        """Goes on generating, with the new weights."""

    def destroy(self) -> None:
        """Lets go of sockets and threads. May be called more than once, also after a failure."""


class TransferError(Exception):
    """The stream between the two sides is not what the manifest says, or it broke."""


class PeerClosedError(TransferError):
    """The other side closed the connection early."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the manifest. Example: ``TensorSpec("model.norm.weight", (64,), "bfloat16")``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tensors ``start`` to ``stop`` (exclusive) of the manifest, together ``nbytes`` long."""

    start: int
    stop: int
    nbytes: int


def split_chunks(sizes: Sequence[int], buffer_bytes: int) -> Iterator[Chunk]:
    """Cuts tensors of the given sizes (bytes) into chunks; a chunk ends with the tensor that exceeds the buffer."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > buffer_bytes:
            yield Chunk(start, i + 1, total)
            start, total = i + 1, 0
    if start < len(sizes):
        yield Chunk(start, len(sizes), total)


def manifest_to_json(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """The ``update_info`` of a manifest."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def manifest_from_json(info: dict[str, Any]) -> list[TensorSpec]:
    """Reads an ``update_info``; raises ValueError on missing fields, unequal lengths, duplicates, unknown dtypes."""
    for field in ("names", "dtype_names", "shapes"):
        if not isinstance(info.get(field), list):
            raise ValueError(f"update_info needs the list {field!r}")
    names, dtypes, shapes = info["names"], info["dtype_names"], info["shapes"]
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError("names, dtype_names and shapes must have the same length")
    if len(set(names)) != len(names):
        raise ValueError("duplicate names in the manifest")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name}: bad shape {shape}")
    return [TensorSpec(*item) for item in zip(names, map(tuple, shapes), dtypes, strict=True)]


@dataclasses.dataclass(frozen=True)
class HostInitInfo:
    """Where the server finds the trainer.

    Attributes:
        address, port: where the trainer listens.
        token: 32 hex digits that the worker shows, so that a stray connection is told from a worker.
        transfer_id: names this trainer; every ``update_info`` repeats it, so that a second trainer on the same server
            is noticed.
        packed_buffer_size_bytes: the buffer size of the chunk rule.
        connect_timeout_s: bound on the connection.
        io_timeout_s: longest silence of the trainer.
        shared_pid, shared_fd: the trainer's process and the descriptor of its shared memory there; -1: none.
        slot_bytes: size of one slot of it.
    """

    address: str
    port: int
    token: str
    transfer_id: str = ""
    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES
    connect_timeout_s: float = 10.0
    io_timeout_s: float = 30.0
    shared_pid: int = -1
    shared_fd: int = -1
    slot_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The ``init_info``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, info: dict[str, Any]) -> HostInitInfo:
        """Reads an ``init_info``, leaving out what it does not know; raises ValueError on a bad value."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not info.get("address") or not info.get("port"):
            raise ValueError("host weight transfer needs address and port")
        result = cls(**{"token": "", **{name: value for name, value in info.items() if name in known}})
        if len(result.token_bytes) != TOKEN_BYTES:
            raise ValueError(f"host weight transfer: token must be {TOKEN_BYTES} bytes of hex")
        return result

    @property
    def token_bytes(self) -> bytes:
        """The token as it travels in the hello."""
        return bytes.fromhex(self.token)


@contextlib.contextmanager
def receiving(
    info: HostInitInfo, update_info: dict[str, Any], rank: int = 0
) -> Iterator[Iterator[tuple[TensorSpec, np.ndarray]]]:
    """The worker's side of one transfer: a context whose value yields every tensor of the manifest as uint8 [nbytes].

    Each chunk has a buffer of its own, of which its tensors are views: they stay valid. All tensors must be taken. The
    trainer is told the outcome when the context ends: success, or the text of the exception that left it.

    Raises:
        OSError: the trainer cannot be reached, is silent for too long, or the connection broke.
        ValueError: the ``update_info`` is not a manifest, or not from the trainer of ``info``.
        TransferError: the stream does not match the manifest, ended early, or the trainer gave up.
    """
    if update_info.get("transfer_id", "") != info.transfer_id:
        # Connecting would hand the wrong trainer a worker.
        raise ValueError(
            "the weights come from another trainer than the one that the server was last initialised by: two "
            "trainers use this server; stop one of them"
        )
    specs = manifest_from_json(update_info)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(
            socket.create_connection((info.address, info.port), timeout=info.connect_timeout_s)
        )
        connection.settimeout(info.io_timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shared = _open_shared(info)
        if shared is not None:
            stack.callback(shared.close)
        connection.sendall(HELLO.pack(MAGIC, rank, info.token_bytes, shared is not None))
        try:
            yield _tensors(connection, shared, info, specs)
        except Exception as exc:
            _report_failure(connection, str(exc) or type(exc).__name__)
            raise
        connection.sendall(FRAME.pack(OKAY, 0))


def _tensors(
    connection: socket.socket, shared: mmap.mmap | None, info: HostInitInfo, specs: Sequence[TensorSpec]
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    sizes = [spec.nbytes for spec in specs]
    for number, chunk in enumerate(split_chunks(sizes, info.packed_buffer_size_bytes)):
        first, last = specs[chunk.start].name, specs[chunk.stop - 1].name
        where = f"packed chunk mismatch for tensors {chunk.start}..{chunk.stop - 1} ({first} .. {last})"
        kind = _expect_frame(connection, (CHUNK, SHARED_CHUNK), chunk.nbytes, where)
        buffer = np.empty(chunk.nbytes, np.uint8)
        if kind == CHUNK:
            receive_exactly(connection, memoryview(buffer.data))
        elif shared is not None:
            offset = SLOTS_OFFSET + number % NUM_SLOTS * info.slot_bytes
            # Through bytes of the map itself: an array over it would forbid closing the map.
            memoryview(buffer.data)[:] = memoryview(shared)[offset : offset + chunk.nbytes]
            connection.sendall(FRAME.pack(TAKEN, chunk.nbytes))
        else:
            raise TransferError("the trainer sends through shared memory, which this worker could not open")
        offset = 0
        for i in range(chunk.start, chunk.stop):
            yield specs[i], buffer[offset : offset + sizes[i]]
            offset += sizes[i]
    _expect_frame(connection, (DONE,), sum(sizes), "end of transfer")


def _open_shared(info: HostInitInfo) -> mmap.mmap | None:
    """The trainer's shared memory, or None where it cannot be opened or is not the trainer's."""
    if info.shared_fd < 0:
        return None
    try:
        fd = os.open(f"/proc/{info.shared_pid}/fd/{info.shared_fd}", os.O_RDONLY)
    except OSError:
        return None
    try:
        shared = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # not a file that can be mapped
        return None
    finally:
        os.close(fd)
    if secrets.compare_digest(shared[:TOKEN_BYTES], info.token_bytes):
        return shared
    shared.close()
    return None


def _report_failure(connection: socket.socket, text: str) -> None:
    """Tells the trainer, then waits until it has hung up: closing first would throw away what it has not read yet."""
    message = text.encode()[:_MAX_ERROR_BYTES]
    with contextlib.suppress(OSError):
        connection.sendall(FRAME.pack(FAILED, len(message)) + message)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(_RECEIVE_BYTES):
            pass


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fills the writable view from the socket; raises PeerClosedError when the other side closes first."""
    got = 0
    while got < len(view):
        count = connection.recv_into(view[got:], min(len(view) - got, _RECEIVE_BYTES))
        if count == 0:
            raise PeerClosedError(f"the other side closed the connection after {got} of {len(view)} bytes")
        got += count


def receive_frame(connection: socket.socket) -> tuple[bytes, int]:
    """Kind and size of the next frame. Raises TransferError when the other side closed, gave up or failed."""
    head = bytearray(FRAME.size)
    receive_exactly(connection, memoryview(head))
    kind, size = FRAME.unpack(head)
    if kind == ABORT:
        raise TransferError("the trainer aborted the transfer")
    if kind == FAILED:
        text = bytearray(min(size, _MAX_ERROR_BYTES))
        receive_exactly(connection, memoryview(text))
        raise TransferError(text.decode(errors="replace"))
    return kind, size


def _expect_frame(connection: socket.socket, kinds: tuple[bytes, ...], size: int, where: str) -> bytes:
    got_kind, got_size = receive_frame(connection)
    if got_kind not in kinds or got_size != size:
        raise TransferError(
            f"{where}: the manifest says {kinds[0].decode()} {size} bytes, "
            f"the trainer sends {got_kind.decode('ascii', 'replace')} {got_size}"
        )
    return got_kind

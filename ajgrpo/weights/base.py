"""What a weight push is made of: the protocol of a transfer, the manifest, and the bytes of the host transport.

    trainer (listens)                                      server worker (connects once per update_weights)
        ◀── HELLO  magic, rank, token ──────────────────────
        ─── FRAME "CHNK" nbytes, then nbytes of data ──────▶   once for each chunk, in manifest order
        ─── FRAME "DONE" total bytes ──────────────────────▶
        ─── FRAME "ABRT" 0 ────────────────────────────────▶   instead of any frame: the trainer gave up

A chunk is the row-major bytes of consecutive tensors, and closes as soon as it is larger than the buffer size (vLLM's
packed rule), so both sides find the same boundaries from the manifest alone, and a manifest on which they disagree
shows as a chunk of the wrong size. The module needs NumPy only: it also runs inside a vLLM worker.

Left out: how a side obtains or uses the tensors (``hf.mapping``, the server's engine).
"""

from __future__ import annotations

import dataclasses
import math
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
MAGIC = b"AJG1"
HELLO = struct.Struct("<4sI16s")
FRAME = struct.Struct("<4sQ")
CHUNK, DONE, ABORT = b"CHNK", b"DONE", b"ABRT"
TOKEN_BYTES = 16

_RECEIVE_BYTES = 1 << 22


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
        packed_buffer_size_bytes: the buffer size of the chunk rule.
        connect_timeout_s: bound on the connection.
        io_timeout_s: longest silence of the trainer.
        transport: always ``"tcp"``.
    """

    address: str
    port: int
    token: str
    packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES
    connect_timeout_s: float = 10.0
    io_timeout_s: float = 30.0
    transport: str = "tcp"

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
        if result.transport != "tcp":
            raise ValueError(f"host weight transfer: transport must be 'tcp', got {result.transport!r}")
        if len(result.token_bytes) != TOKEN_BYTES:
            raise ValueError(f"host weight transfer: token must be {TOKEN_BYTES} bytes of hex")
        return result

    @property
    def token_bytes(self) -> bytes:
        """The token as it travels in the hello."""
        return bytes.fromhex(self.token)


def receive_tensors(
    info: HostInitInfo, specs: Sequence[TensorSpec], rank: int = 0
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Connects to the trainer and yields every tensor of the manifest as uint8 [nbytes].

    Each chunk has a buffer of its own, of which its tensors are views: they stay valid.

    Raises:
        OSError: the trainer cannot be reached, is silent for too long, or the connection broke.
        TransferError: the stream does not match the manifest, ended early, or the trainer gave up.
    """
    sizes = [spec.nbytes for spec in specs]
    with socket.create_connection((info.address, info.port), timeout=info.connect_timeout_s) as connection:
        connection.settimeout(info.io_timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HELLO.pack(MAGIC, rank, info.token_bytes))
        for chunk in split_chunks(sizes, info.packed_buffer_size_bytes):
            first, last = specs[chunk.start].name, specs[chunk.stop - 1].name
            where = f"packed chunk mismatch for tensors {chunk.start}..{chunk.stop - 1} ({first} .. {last})"
            _expect_frame(connection, CHUNK, chunk.nbytes, where)
            buffer = np.empty(chunk.nbytes, np.uint8)
            receive_exactly(connection, memoryview(buffer.data))
            offset = 0
            for i in range(chunk.start, chunk.stop):
                yield specs[i], buffer[offset : offset + sizes[i]]
                offset += sizes[i]
        _expect_frame(connection, DONE, sum(sizes), "end of transfer")


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fills the writable view from the socket; raises TransferError when the other side closes first."""
    got = 0
    while got < len(view):
        count = connection.recv_into(view[got:], min(len(view) - got, _RECEIVE_BYTES))
        if count == 0:
            raise TransferError(f"the other side closed the connection after {got} of {len(view)} bytes")
        got += count


def _expect_frame(connection: socket.socket, kind: bytes, size: int, where: str) -> None:
    head = bytearray(FRAME.size)
    receive_exactly(connection, memoryview(head))
    got_kind, got_size = FRAME.unpack(head)
    if got_kind == ABORT:
        raise TransferError("the trainer aborted the transfer")
    if (got_kind, got_size) != (kind, size):
        raise TransferError(
            f"{where}: the manifest says {kind.decode()} {size} bytes, "
            f"the trainer sends {got_kind.decode('ascii', 'replace')} {got_size}"
        )

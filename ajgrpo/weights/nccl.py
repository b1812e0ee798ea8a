"""The ``nccl`` transport: weights from the trainer's GPU to those of the server, with vLLM's own NCCL engine there.

    trainer's thread                         link's thread                                server's workers
    mint a unique id
    POST /init_weight_transfer_engine ──────────────────────────────────────────────────▶ ncclCommInitRank (1 … N)
                                             ncclCommInitRank (rank 0), one all-reduce ◀─▶ both together
    POST /update_weights (waits for reply) ─────────────────────────────────────────────▶ broadcasts from rank 0
                                             pack chunk 0 into buffer 0, broadcast ──────▶
                                             pack chunk 1 into buffer 1, broadcast ──────▶ …
         ◀──────────────────────────────────────────────────────────────────────────────── reply

A chunk is packed by vLLM's rule (``base.split_chunks``) into one of two buffers, each with a stream of its own, so that
chunk i + 1 is laid out while chunk i is on its way. Arrays go from JAX to CuPy by DLPack, as unsigned integers of their
width (bfloat16 included), and never through the host.

With several trainer devices a parameter is gathered by a collective of XLA's. Two communicators that wait for each
other on one device can lock up, so no parameter is taken while a broadcast runs: then nothing overlaps, and memory
beyond the buffers is that of one layer.

On any failure the communicator is aborted, not destroyed (destroying waits for the other side), and the next push makes
a new one. The library itself sits behind ``Link``, so that everything else is tested without a GPU.

Left out: trainers of several hosts; rendezvous over TCP, which vLLM before 0.30 needs.
"""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ajgrpo.errors import WeightTransferError
from ajgrpo.inference.client import ControlClient
from ajgrpo.weights import base
from ajgrpo.weights.base import TensorSpec, TransferError
from ajgrpo.weights.cycle import PushCycle

BACKEND = "nccl"
UNIQUE_ID_BYTES = 128
NUM_BUFFERS = 2
OLDEST_VERSION = (0, 30)
"""The first vLLM whose workers take a unique id."""

REPLY_GRACE_S = 5.0
"""How long the transfer may go on once the server has answered that it has everything."""

_POLL_S = 0.0005
_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


class Link(Protocol):
    """One communicator of NCCL, rank 0, and two buffers on its device. Errors are ``OSError`` or ``RuntimeError``."""

    def library_version(self) -> str:
        """For example ``"2.27.3"``."""

    def unique_id(self) -> bytes:
        """A new id, ``UNIQUE_ID_BYTES`` long."""

    def connect(self, unique_id: bytes, world_size: int) -> None:
        """Blocks until all ranks are there; then takes part in the one-element all-reduce that vLLM starts with."""

    def pack(self, buffer: int, offset: int, nbytes: int, array: jax.Array) -> None:
        """Copies the row-major bytes of an unsigned integer array to ``offset``; ``nbytes`` is the whole chunk's."""

    def broadcast(self, buffer: int, nbytes: int) -> None:
        """Sends the buffer's first ``nbytes`` after its packing is done; returns at once."""

    def busy(self, buffer: int) -> bool:
        """Whether the buffer's work is still going on; raises when the communicator has failed."""

    def abort(self) -> None:
        """Ends the communicator and whatever waits in it. May be called from any thread, and more than once."""


class NcclWeightTransfer(PushCycle):
    """Pushes weights from the trainer's first device; ``send`` takes JAX arrays.

    Args:
        control, manifest, deadline_s: see ``PushCycle``.
        make_link: makes a link for one communicator; default: CuPy's NCCL.
        gathers: whether taking a parameter runs a collective, as it does when they are sharded over devices.
        buffer_bytes: the buffer size of the chunk rule.
    """

    def __init__(
        self,
        control: ControlClient,
        manifest: Sequence[TensorSpec],
        *,
        deadline_s: float,
        make_link: Callable[[], Link] | None = None,
        gathers: bool = False,
        buffer_bytes: int = base.DEFAULT_BUFFER_BYTES,
    ):
        super().__init__(control, manifest, deadline_s=deadline_s)
        self._make_link, self._gathers, self._buffer_bytes = make_link or CupyLink, gathers, buffer_bytes
        self._link: Link | None = None

    def destroy(self) -> None:
        """Aborts the communicator."""
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def _connect(self) -> None:
        self.destroy()
        version = self._call("init", lambda left: self._control.version())
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is not None and (int(match[1]), int(match[2])) < OLDEST_VERSION:
            raise WeightTransferError(
                "init",
                f"the server is vLLM {version}, whose NCCL transfer meets its trainer through PyTorch's TCPStore only; "
                "install vLLM 0.30 or newer (best 0.32), or use the backend 'host'",
            )
        link = self._link = self._make_link()
        self._compare_libraries(link)
        unique_id = link.unique_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": self.world_size + 1,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }
        joining = _Task("ajgrpo-nccl-init", lambda: link.connect(unique_id, self.world_size + 1))
        self._watched("init", joining, lambda left: self._control.init_transfer(info, timeout_s=left))

    def _compare_libraries(self, link: Link) -> None:
        theirs = self._call("init", lambda left: self._control.nccl_version())
        ours = link.library_version()
        if theirs is not None and theirs != ours:
            raise WeightTransferError(
                "init",
                f"NCCL is {ours} here and {theirs} in the server, and NCCL refuses peers of another version; install "
                "the same nvidia-nccl package on both sides",
            )

    def _update(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        assert self._link is not None and self._deadline is not None, "init() comes first"
        link, deadline = self._link, self._deadline
        sending = _Task("ajgrpo-nccl-send", lambda: self._send_all(link, named_arrays, deadline))
        info = base.manifest_to_json(self._manifest)
        self._watched("update", sending, lambda left: self._control.update_weights(info, timeout_s=left))

    def _watched(self, phase: str, task: _Task, request: Callable[[float], None]) -> None:
        """Runs a request beside a task that needs the server's part in it; a failure of either aborts the link."""
        task.start()
        try:
            self._call(phase, request)
        except WeightTransferError:
            self.destroy()
            task.join(REPLY_GRACE_S)
            # Aborting breaks the task too; an error of its own kind is the cause, not the consequence.
            if isinstance(task.error, TransferError):
                raise WeightTransferError(phase, str(task.error)) from task.error
            raise
        if not task.join(min(REPLY_GRACE_S, self._left(phase))):
            self.destroy()
            raise WeightTransferError(phase, "the server answered, but the communicator is still waiting for it")
        if task.error is not None:
            self.destroy()
            raise WeightTransferError(phase, str(task.error) or type(task.error).__name__) from task.error

    def _send_all(self, link: Link, named_arrays: Iterable[tuple[str, Any]], deadline: float) -> None:
        finished = False
        try:
            tensors = iter(named_arrays)
            sizes = [spec.nbytes for spec in self._manifest]
            for number, chunk in enumerate(base.split_chunks(sizes, self._buffer_bytes)):
                buffer, offset = number % NUM_BUFFERS, 0
                for other in range(NUM_BUFFERS) if self._gathers else (buffer,):
                    _await(link, other, deadline)
                for spec in self._manifest[chunk.start : chunk.stop]:
                    link.pack(buffer, offset, chunk.nbytes, device_bits(spec, next(tensors, None)))
                    offset += spec.nbytes
                link.broadcast(buffer, chunk.nbytes)
            if (extra := next(tensors, None)) is not None:
                raise TransferError(f"tensor {extra[0]!r} comes after the end of the manifest")
            for buffer in range(NUM_BUFFERS):
                _await(link, buffer, deadline)
            finished = True
        finally:
            if not finished:
                link.abort()  # the workers wait in a broadcast that will not come


class _Task:
    """A function in a thread of its own, which may never return: a daemon, so that the process can end."""

    def __init__(self, name: str, function: Callable[[], None]):
        self._function = function
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as exc:  # handed to the thread that waits
            self.error = exc


def device_bits(spec: TensorSpec, item: tuple[str, Any] | None) -> jax.Array:
    """The array that must match ``spec``, as unsigned integers on one device; TransferError when it does not match."""
    if item is None:
        raise TransferError(f"the tensors end before {spec.name!r} of the manifest")
    name, array = item[0], jnp.asarray(item[1])
    got = TensorSpec(name, array.shape, array.dtype.name)
    if got != spec:
        raise TransferError(f"the manifest says {spec}, the trainer's next tensor is {got}")
    if len(array.sharding.device_set) > 1:
        array = jax.device_put(array, jax.local_devices()[0])
    return jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])


def _await(link: Link, buffer: int, deadline: float) -> None:
    while link.busy(buffer):
        if time.monotonic() > deadline:
            raise TimeoutError("a broadcast did not end within the push's deadline; is a server worker hanging?")
        time.sleep(_POLL_S)


class CupyLink:
    """``Link`` by CuPy's binding of NCCL, on the current CUDA device.

    Raises:
        WeightTransferError: CuPy is not installed.
    """

    def __init__(self) -> None:
        try:
            import cupy
            from cupy.cuda import nccl
        except ImportError as exc:
            raise WeightTransferError(
                "init", f"the backend 'nccl' needs CuPy with NCCL ({exc}): pip install 'ajgrpo[cuda12]' or [cuda13]"
            ) from exc
        self._cupy, self._nccl = cupy, nccl
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(NUM_BUFFERS)]
        self._buffers = [cupy.empty(0, cupy.uint8) for _ in range(NUM_BUFFERS)]
        self._held: list[list[Any]] = [[] for _ in range(NUM_BUFFERS)]
        self._comm: Any = None
        self._lock = threading.Lock()

    def library_version(self) -> str:
        """See ``Link``. NCCL packs 2.27.3 as 22703."""
        number = int(self._nccl.get_version())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def unique_id(self) -> bytes:
        """See ``Link``. CuPy gives signed chars."""
        return bytes(value & 0xFF for value in self._nccl.get_unique_id())

    def connect(self, unique_id: bytes, world_size: int) -> None:
        """See ``Link``."""
        signed = tuple(value - 256 if value > 127 else value for value in unique_id)
        comm = self._nccl.NcclCommunicator(world_size, signed, 0)
        with self._lock:
            self._comm = comm
        one, stream = self._cupy.zeros(1, self._cupy.float32), self._streams[0]
        stream.synchronize()
        self._cupy.cuda.get_current_stream().synchronize()
        comm.allReduce(one.data.ptr, one.data.ptr, 1, self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM, stream.ptr)
        self._held[0] = [one]

    def pack(self, buffer: int, offset: int, nbytes: int, array: jax.Array) -> None:
        """See ``Link``."""
        cupy = self._cupy
        jax.block_until_ready(array)  # CuPy's stream does not wait for XLA's
        with self._streams[buffer]:
            if self._buffers[buffer].size < nbytes:
                self._buffers[buffer] = cupy.empty(nbytes, cupy.uint8)
            source = cupy.ascontiguousarray(cupy.from_dlpack(array)).reshape(-1).view(cupy.uint8)
            self._buffers[buffer][offset : offset + source.size] = source
        self._held[buffer].append(array)  # the copy may still be running

    def broadcast(self, buffer: int, nbytes: int) -> None:
        """See ``Link``."""
        pointer = self._buffers[buffer].data.ptr
        self._comm.bcast(pointer, nbytes, self._nccl.NCCL_UINT8, 0, self._streams[buffer].ptr)

    def busy(self, buffer: int) -> bool:
        """See ``Link``."""
        if self._comm is not None:
            self._comm.check_async_error()
        if not self._streams[buffer].done:
            return True
        self._held[buffer].clear()
        return False

    def abort(self) -> None:
        """See ``Link``."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

"""The ``host`` transport: weights from the trainer's host memory, for servers without NCCL.

    trainer's thread                              sender thread                         server
    POST /start_weight_update ────────────────────────────────────────────────────────▶ opens a session
    POST /update_weights (waits for the reply) ───────────────────────────────────────▶ connects back
                                                  accept, check hello  ◀──────────────
                                                  chunk, chunk, …, DONE ──────────────▶ checks, loads
                                                  every worker's outcome ◀─────────────
         ◀──────────────────────────────────────────────────────────────────────────── reply
    POST /finish_weight_update (version) ─────────────────────────────────────────────▶ closes the session

``weights.cycle`` holds what comes before and after a transfer, and what happens when one fails.

Left out: several trainer hosts.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from ajgrpo.errors import WeightTransferError
from ajgrpo.inference.client import ControlClient
from ajgrpo.weights import base
from ajgrpo.weights.base import PeerClosedError, TensorSpec
from ajgrpo.weights.cycle import PushCycle
from ajgrpo.weights.sender import Sender, SharedSlots

IO_TIMEOUT_S = 30.0
"""Longest time without progress on the socket; a healthy transfer is never silent for so long."""

REPORT_GRACE_S = 5.0
"""How long the workers' reports may take to be read once the server has answered."""


class HostWeightTransfer(PushCycle):
    """Pushes weights from host memory; ``send`` takes anything that ``numpy.asarray`` does.

    Args:
        control, manifest, deadline_s: see ``PushCycle``.
        buffer_bytes: the buffer size of the chunk rule.
        io_timeout_s: bound on a silence, on both sides.
        address: what the server connects to; None: this host's address on the way to the server.
        shared_memory: pass the bytes through memory when every worker runs on this machine.

    Attributes:
        used_shared_memory: whether the last push went through memory.
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
        super().__init__(control, manifest, deadline_s=deadline_s)
        self._address, self._buffer_bytes, self._io_timeout_s = address, buffer_bytes, io_timeout_s
        self._shared_memory = shared_memory and SharedSlots.available()
        self._slots: SharedSlots | None = None
        self._transfer_id = secrets.token_hex(8)
        self.used_shared_memory = False
        self._listener: socket.socket | None = None
        self._token = b""

    def destroy(self) -> None:
        """Closes the listener and lets go of the shared memory. The server is left as it is."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _connect(self) -> None:
        """Opens a new listener, with a new token, and tells the server."""
        self.destroy()
        address = self._address or local_address(self._control.base_url)
        self._token = secrets.token_bytes(base.TOKEN_BYTES)
        try:
            self._listener = socket.create_server((address, 0), backlog=max(16, self.world_size))
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

    def _update(self, named_arrays: Iterable[tuple[str, Any]]) -> None:
        assert self._listener is not None and self._deadline is not None, "init() comes first"
        sender = Sender(
            self._listener,
            self._token,
            self._manifest,
            self.world_size,
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

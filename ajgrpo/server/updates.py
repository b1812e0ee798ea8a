"""The weight-update cycle on the server's side: a session that stages new weights on the host and swaps them in whole.

    init ──▶ start ──▶ update (receive, check, stage) ──▶ finish (swap)
               └─ an update that fails leaves the session open and the engine's weights as they were

The texts of the errors are vLLM's, so that a client meets the same server. Unlike vLLM nothing is ever half loaded:
the manifest is checked against the model before the first byte is received.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from ajgrpo.errors import CheckpointError
from ajgrpo.hf import mapping
from ajgrpo.hf.io import NUMPY_DTYPES
from ajgrpo.server.engine import Engine
from ajgrpo.weights import base
from ajgrpo.weights.base import HostInitInfo, TensorSpec, TransferError


class UpdateError(Exception):
    """A step of the cycle that failed; the message goes to the client, with status 500."""


class WeightUpdates:
    """The server's one session. Methods may be called from any thread; a lock makes the steps one after the other."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._info: HostInitInfo | None = None
        self._open = False
        self._staged: Any = None
        self._lock = threading.Lock()

    def init(self, info: dict[str, Any]) -> None:
        """Notes where the trainer listens. May be called again: a trainer may restart."""
        with self._lock:
            try:
                self._info = HostInitInfo.from_json(info)
            except (ValueError, TypeError) as exc:
                raise UpdateError(str(exc)) from exc

    def start(self) -> None:
        """Opens a session."""
        with self._lock:
            if self._open:
                raise UpdateError("A weight update is already active. Call finish_weight_update first.")
            self._open, self._staged = True, None

    def update(self, info: dict[str, Any]) -> None:
        """Receives all tensors of the manifest; blocks until they are here or something failed."""
        with self._lock:
            if not self._open:
                raise UpdateError("start_weight_update must be called before update_weights.")
            if self._info is None:
                raise UpdateError("host weight transfer not initialized: call init_weight_transfer_engine first")
            self._staged = None
            try:
                shapes = {spec.name: spec.shape for spec in base.manifest_from_json(info)}
                mapping.check_tensors(self._engine.config, shapes, "the weight update")
                with base.receiving(self._info, info) as tensors:
                    staged = mapping.assemble(
                        self._engine.config,
                        _arrays(tensors),
                        NUMPY_DTYPES[self._engine.options.dtype],
                        "the weight update",
                    )
                self._staged = staged
            except (ValueError, OSError, TransferError, CheckpointError) as exc:
                raise UpdateError(str(exc)) from exc

    def finish(self, version: str | None) -> Future[None]:
        """Closes the session; the future is done when the engine runs the staged weights (if any) under the label."""
        with self._lock:
            if not self._open:
                raise UpdateError("finish_weight_update called without a matching start_weight_update.")
            staged, self._staged, self._open = self._staged, None, False
            return self._engine.swap_weights(staged, version)


def _arrays(tensors: Iterator[tuple[TensorSpec, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    for spec, raw in tensors:
        yield spec.name, raw.view(NUMPY_DTYPES[spec.dtype]).reshape(spec.shape)

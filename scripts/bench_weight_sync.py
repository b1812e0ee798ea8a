"""Seconds per GB of a weight push over TCP and through shared memory, against copies of the same bytes.

    python scripts/bench_weight_sync.py [--dtype bfloat16] [--layers 28] [--repeats 3]
    python scripts/bench_weight_sync.py --model DIR --server http://localhost:8000      # and the phases of a real push

The model has the shapes of a 0.6B-parameter Qwen3, random weights in float32, as a trainer holds them; a push casts
them and lays them out anew. The receiver is a process of its own that runs the worker's side and keeps all tensors,
without a model. *socket copy* sends as many bytes of one buffer over a local TCP connection to the same process;
*memcpy* copies them inside this one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.hf import io, mapping
from ajgrpo.inference.client import ControlClient
from ajgrpo.models import decoder
from ajgrpo.models.config import ModelConfig
from ajgrpo.weights import base
from ajgrpo.weights.host import HostWeightTransfer
from ajgrpo.weights.sender import copy_row_major

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
BUFFER = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=tuple(base.DTYPE_BYTES), default="bfloat16", help="on the wire")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="push this directory's model instead of random weights")
    parser.add_argument("--server", help="push to this server instead of the receiving process")
    args = parser.parse_args()
    if args.model is not None:
        _, config = io.read_config(args.model)
        params = jax.tree.map(jnp.asarray, io.load_params(args.model, config, dtype="float32"))
    else:
        config = ModelConfig.from_hf(QWEN3_06B | {"num_hidden_layers": args.layers})
        params = decoder.init_params(config, jax.random.key(0), jnp.float32)
    jax.block_until_ready(params)
    manifest = mapping.checkpoint_manifest(config, args.dtype)
    nbytes = sum(spec.nbytes for spec in manifest)
    print(f"{len(manifest)} tensors, {nbytes / 1e9:.3f} GB as {args.dtype}; fastest of {args.repeats}")

    def push(transfer: HostWeightTransfer) -> None:
        transfer.pause()
        transfer.send(mapping.iter_checkpoint(config, params, args.dtype, on_host=True))
        transfer.resume()

    if args.server is not None:
        control: Any = ControlClient(args.server, timeout_s=600)
        for shared in (False, True):
            measure_push(control, manifest, push, shared, nbytes, args.repeats)
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive_forever, args=(theirs,), daemon=True)
    receiver.start()
    try:
        control = StandInControl(ours)
        pushes = [measure_push(control, manifest, push, shared, nbytes, args.repeats) for shared in (False, True)]
        data = np.ones(nbytes, np.uint8)
        target = np.zeros(nbytes, np.uint8)
        copy = report("socket copy", nbytes, fastest(lambda: socket_copy(ours, data), args.repeats))
        report("memcpy", nbytes, fastest(lambda: np.copyto(target, data), args.repeats))
        layout = report("re-layout alone", nbytes, fastest(lambda: lay_out(config, params, args.dtype), args.repeats))
        for name, seconds in zip(("tcp", "shared memory"), pushes, strict=True):
            print(f"{name}: {copy / seconds:.2f} of the socket copy's speed, re-layout ({layout:.2f} s) included")
    finally:
        ours.send(None)
        receiver.join(30)


def measure_push(
    control: Any, manifest: Any, push: Callable[[HostWeightTransfer], None], shared: bool, nbytes: int, repeats: int
) -> float:
    """Seconds of the fastest push after a first one, which compiles."""
    transfer = HostWeightTransfer(control, manifest, deadline_s=600.0, shared_memory=shared)
    transfer.init()
    try:
        push(transfer)
        assert transfer.used_shared_memory is shared
        best: dict[str, float] = {}
        for _ in range(repeats):
            push(transfer)
            if not best or sum(transfer.phase_seconds.values()) < sum(best.values()):
                best = dict(transfer.phase_seconds)
    finally:
        transfer.destroy()
    seconds = report("shared memory" if shared else "tcp", nbytes, sum(best.values()))
    print("    " + ", ".join(f"{phase} {1000 * value:.0f} ms" for phase, value in best.items()))
    return seconds


def report(name: str, nbytes: int, seconds: float) -> float:
    print(f"{name:<16} {seconds:6.3f} s  {seconds / (nbytes / 1e9):6.3f} s/GB")
    return seconds


def fastest(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def lay_out(config: ModelConfig, params: Any, dtype: str) -> None:
    for _, tensor in mapping.iter_checkpoint(config, params, dtype, on_host=True):
        copy_row_major(tensor, np.empty(tensor.shape, tensor.dtype))


class StandInControl:
    """The calls of a push; ``update_weights`` has the other process receive."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, pipe: Connection):
        self._pipe, self._info = pipe, {}

    def world_size(self) -> int:
        return 1

    def is_paused(self, *, timeout_s: float | None = None) -> bool:
        return False

    def pause(self, *, timeout_s: float | None = None) -> None: ...

    def resume(self, *, timeout_s: float | None = None) -> None: ...

    def start_update(self, *, timeout_s: float | None = None) -> None: ...

    def finish_update(self, version: str | None = None, *, timeout_s: float | None = None) -> None: ...

    def init_transfer(self, info: dict[str, Any], *, timeout_s: float | None = None) -> None:
        self._info = info

    def update_weights(self, info: dict[str, Any], *, timeout_s: float | None = None) -> None:
        self._pipe.send(("push", self._info, info))
        assert self._pipe.recv() == "done"


def socket_copy(pipe: Connection, data: np.ndarray) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(("copy", listener.getsockname()[1], data.nbytes))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(data.data)
            assert pipe.recv() == "done"


def receive_forever(pipe: Connection) -> None:
    while (order := pipe.recv()) is not None:
        if order[0] == "push":
            with base.receiving(base.HostInitInfo.from_json(order[1]), order[2]) as tensors:
                kept = list(tensors)
            del kept
        else:
            buffer = np.empty(order[2], np.uint8)
            with socket.create_connection(("127.0.0.1", order[1])) as connection:
                base.receive_exactly(connection, memoryview(buffer.data))
        pipe.send("done")


if __name__ == "__main__":
    main()

"""Checks on one NVIDIA GPU what the tests can only check against a stand-in.

    python scripts/gpu_check.py nccl [--megabytes 512]

``nccl``: arrays of JAX reach CuPy by DLPack bit for bit (float32 and bfloat16), a communicator of one rank opens, the
packed buffer holds the bytes that NumPy packs, and a broadcast returns; prints GB/s of packing against a copy on the
device. Needs ``pip install 'ajgrpo[cuda12]'`` or ``[cuda13]``. Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory of its own

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.weights.base import TensorSpec
from ajgrpo.weights.nccl import CupyLink, device_bits

REPEATS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["nccl"])
    parser.add_argument("--megabytes", type=int, default=512, help="size of the array that is timed")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"no GPU: JAX runs on {device.platform}", file=sys.stderr)
        return 1
    import cupy

    link = CupyLink()
    print(f"{device.device_kind}, jax {jax.__version__}, cupy {cupy.__version__}, NCCL {link.library_version()}")
    unique_id = link.unique_id()
    assert len(unique_id) == 128, len(unique_id)
    link.connect(unique_id, 1)
    failed = 0
    for dtype in ("float32", "bfloat16"):
        array = jax.random.normal(jax.random.key(0), (257, 129)).astype(dtype).T  # laid out anew by JAX
        spec = TensorSpec("x", array.shape, dtype)
        link.pack(0, 3 * 4, spec.nbytes + 12, device_bits(spec, ("x", array)))
        link.broadcast(0, spec.nbytes + 12)
        wait(link)
        packed = cupy.asnumpy(link._buffers[0])[12 : 12 + spec.nbytes]
        same = packed.tobytes() == np.ascontiguousarray(np.asarray(array)).tobytes()
        print(f"{dtype}: packed bytes equal to the reference: {'ok' if same else 'FAILED'}")
        failed += not same
    count = args.megabytes * 2**20 // 4
    array = jnp.arange(count, dtype=jnp.float32)
    spec = TensorSpec("x", array.shape, "float32")
    bits = jax.block_until_ready(device_bits(spec, ("x", array)))
    source, target = cupy.zeros(count, cupy.uint32), cupy.empty(count, cupy.uint32)

    def pack() -> None:
        link.pack(0, 0, spec.nbytes, bits)
        wait(link)

    def copy() -> None:
        cupy.copyto(target, source)
        cupy.cuda.get_current_stream().synchronize()

    packing, copying = rate(pack, spec.nbytes), rate(copy, spec.nbytes)
    print(f"packing {packing:.0f} GB/s, copy on the device {copying:.0f} GB/s, ratio {packing / copying:.2f}")
    link.abort()
    link.abort()
    return 1 if failed else 0


def wait(link: CupyLink) -> None:
    deadline = time.monotonic() + 60.0
    while link.busy(0):
        if time.monotonic() > deadline:
            raise TimeoutError("the stream did not finish within 60 s")


def rate(work: Callable[[], None], nbytes: int) -> float:
    """GB/s of the fastest of some repeats."""
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


if __name__ == "__main__":
    sys.exit(main())

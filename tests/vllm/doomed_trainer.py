"""A trainer that kills itself in the middle of a push: ``python -m tests.vllm.doomed_trainer URL PHASE tcp|shared``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ajgrpo.hf import mapping
from ajgrpo.inference.client import ControlClient
from tests.vllm.policies import TIED

CALLS = {"pause": "pause", "start": "start_update", "finish": "finish_update", "resume": "resume"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(url: str, phase: str, way: str) -> None:
    control = ControlClient(url, timeout_s=30)
    name = phase.removeprefix("after ")
    if name in CALLS:
        call: Callable[..., Any] = getattr(control, CALLS[name])

        def doomed(*args: Any, **kwargs: Any) -> None:
            if phase.startswith("after "):
                call(*args, **kwargs)
            die()

        setattr(control, CALLS[name], doomed)

    def tensors():
        for count, item in enumerate(mapping.iter_checkpoint(TIED.config, TIED.params(1), "float32")):
            if phase == "update" and count == 9:
                die()
            yield item

    with TIED.transfer(control, buffer_bytes=4096, shared_memory=way == "shared") as transfer:
        transfer.pause()
        transfer.send(tensors())
        transfer.resume()
    raise AssertionError(f"survived phase {phase!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])

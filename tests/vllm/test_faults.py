"""What breaks during a push into a real vLLM: each fault ends in time, names its phase, and the next run works."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from ajgrpo.errors import WeightTransferError
from ajgrpo.hf import mapping
from ajgrpo.inference.client import ControlClient
from tests.vllm.policies import TIED
from tests.vllm.server import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DEADLINE_S = 20.0
PHASES = ["pause", "after pause", "after start", "update", "finish", "after finish", "after resume"]


def transfer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ajgrpo")]


@pytest.mark.parametrize(("phase", "way"), [*((phase, "tcp") for phase in PHASES), ("update", "shared")])
def test_a_killed_trainer_is_followed_by_another(server, control, phase, way):
    command = [sys.executable, "-m", "tests.vllm.doomed_trainer", server.base_url, phase, way]
    trainer = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    with TIED.transfer(control, deadline_s=60.0) as transfer:
        TIED.push(transfer, 2)
        TIED.assert_served(server.base_url, 2, "0")
        TIED.push(transfer, 0)
        TIED.assert_served(server.base_url, 0, "1")


@pytest.mark.parametrize("phase", ["pause", "start", "update", "finish", "resume"])
def test_a_killed_server_ends_the_push_and_a_new_server_takes_the_next(servers, phase):
    server = servers.get("tied", TIED.directory)
    control = ControlClient(server.base_url, timeout_s=30)
    calls = {"pause": "pause", "start": "start_update", "finish": "finish_update", "resume": "resume"}
    if phase in calls:
        call = getattr(control, calls[phase])

        def killing(*args, **kwargs):
            server.kill()
            return call(*args, **kwargs)

        setattr(control, calls[phase], killing)

    def tensors():
        for count, item in enumerate(mapping.iter_checkpoint(TIED.config, TIED.params(1), "float32")):
            if phase == "update" and count == 9:
                server.kill()
            yield item

    start = time.monotonic()
    with TIED.transfer(control, deadline_s=DEADLINE_S, buffer_bytes=4096, shared_memory=False) as transfer:
        with pytest.raises(WeightTransferError) as caught:
            transfer.pause()
            transfer.send(tensors())
            transfer.resume()
        assert caught.value.phase == phase
    assert time.monotonic() - start < DEADLINE_S + 10
    assert "vllm_server_base_url" in str(caught.value) or "connection" in str(caught.value)
    assert transfer_threads() == []
    assert server.pids() == []
    control.close()
    if phase == "update":  # starting a server is the slow part: once is enough
        fresh = servers.get("tied", TIED.directory)
        control = ControlClient(fresh.base_url, timeout_s=30)
        with TIED.transfer(control) as transfer:
            TIED.push(transfer, 1)
        TIED.assert_served(fresh.base_url, 1, "0")
        control.close()


def test_a_second_trainer_on_the_same_server_is_noticed_and_can_go_on(server, control):
    with TIED.transfer(control) as first:
        TIED.push(first, 1)
        with TIED.transfer(control) as second:
            first.pause()
            with pytest.raises(WeightTransferError, match=r"phase 'update': .*two trainers use this server"):
                first.send(mapping.iter_checkpoint(TIED.config, TIED.params(1), "float32"))
            TIED.push(second, 2)
            TIED.assert_served(server.base_url, 2, "0")

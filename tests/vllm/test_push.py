"""Weight pushes into a real vLLM: what it samples from afterwards, and what is left on either side."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import threading

import numpy as np
import pytest

from ajgrpo.errors import ServerResponseError, WeightTransferError
from ajgrpo.hf import mapping
from ajgrpo.inference.client import parse_metrics
from ajgrpo.weights.base import TensorSpec
from tests.vllm import policies
from tests.vllm.policies import TIED, generate, request

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MANIFEST = mapping.checkpoint_manifest(TIED.config, "float32")
NORM = mapping.checkpoint_manifest(TIED.config)[-1].name


@pytest.fixture(autouse=True)
def original_weights(request, server, control):
    """Every test starts from policy 0, on a server that generates."""
    with TIED.transfer(control) as transfer:
        TIED.push(transfer, 0)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("buffer_bytes", [1, 4096, 1 << 28])
def test_pushed_weights_are_sampled_from(server, control, shared_memory, buffer_bytes):
    with TIED.transfer(control, shared_memory=shared_memory, buffer_bytes=buffer_bytes) as transfer:
        TIED.push(transfer, 1)
        assert transfer.used_shared_memory is shared_memory
        TIED.assert_served(server.base_url, 1, "0")
        TIED.push(transfer, 2)
        TIED.assert_served(server.base_url, 2, "1")


def test_weights_pushed_back_give_the_same_bits(server, control):
    first = generate(server.base_url)
    with TIED.transfer(control) as transfer:
        TIED.push(transfer, 1)
        TIED.assert_served(server.base_url, 1)
        TIED.push(transfer, 0)
    again = generate(server.base_url)
    assert (again.token_ids, again.log_probs) == (first.token_ids, first.log_probs)


def test_bfloat16_on_the_wire(server, control):
    with TIED.transfer(control, "bfloat16") as transfer:
        TIED.push(transfer, 1, "bfloat16")
    reply = generate(server.base_url)
    difference = np.abs(np.asarray(reply.log_probs) - TIED.log_probs(1, policies.PROMPT, reply.token_ids)).max()
    assert 1e-4 < difference < 0.5  # rounding to 8 bits, not other weights


def test_requests_in_flight_finish_under_both_policies(server, control):
    requests = [request(480, seed=seed) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool, TIED.transfer(control) as transfer:
        TIED.push(transfer, 0)
        before = parse_metrics(control.metrics_text())["vllm:generation_tokens_total"]
        replies = pool.submit(generate, server.base_url, *requests)
        while parse_metrics(control.metrics_text())["vllm:generation_tokens_total"] < before + 80:
            threading.Event().wait(0.01)
        TIED.push(transfer, 1)
        finished = replies.result(120)
    for reply in finished:
        old, new = reply.weight_spans
        assert (old.start, old.end, new.end) == (0, new.start, 480)
        assert (old.version, new.version) == ("0", "1")
        cut, log_probs = old.end, np.asarray(reply.log_probs)
        for number, part in ((0, slice(0, cut)), (1, slice(cut, None))):
            expected = TIED.log_probs(number, policies.PROMPT, reply.token_ids)
            np.testing.assert_allclose(log_probs[part], expected[part], rtol=0, atol=policies.TOLERANCE)


def changed(position: int, **changes) -> list[TensorSpec]:
    specs = list(MANIFEST)
    specs[position] = dataclasses.replace(specs[position], **changes)
    return specs


BAD_MANIFESTS = {
    "missing": (MANIFEST[:-1], "manifest does not cover the model.*norm"),
    "extra": ([*MANIFEST, TensorSpec("model.extra.weight", (4,), "float32")], "extra"),
    "duplicate": ([*MANIFEST, MANIFEST[-1]], "duplicate names"),
    "misshaped": (changed(3, shape=(7, 5)), "cannot load"),
    "another layer's name": (changed(5, name="model.layers.9.input_layernorm.weight"), r"layers.9"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_manifests_that_do_not_fit_are_named_and_a_push_repairs(server, control, case, shared_memory):
    manifest, text = BAD_MANIFESTS[case]
    arrays = [(spec.name, np.zeros(spec.shape, np.float32)) for spec in manifest]
    with TIED.transfer(control, manifest=manifest, shared_memory=shared_memory) as transfer:
        with pytest.raises(WeightTransferError, match=text) as caught:
            transfer.pause()
            transfer.send(arrays)
        assert caught.value.phase == "update"
        with pytest.raises(WeightTransferError, match="push again first"):
            transfer.resume()
    assert control.is_paused()
    with TIED.transfer(control) as transfer:
        TIED.push(transfer, 1)
    TIED.assert_served(server.base_url, 1, "0")


def test_another_order_of_the_tensors_is_fine(server, control):
    order = np.random.default_rng(0).permutation(len(MANIFEST))
    tensors = list(mapping.iter_checkpoint(TIED.config, TIED.params(1), "float32"))
    with TIED.transfer(control, manifest=[MANIFEST[i] for i in order]) as transfer:
        transfer.pause()
        transfer.send([tensors[i] for i in order])
        transfer.resume()
    TIED.assert_served(server.base_url, 1)


def test_a_wrong_type_is_refused_by_the_server_itself(server, control):
    info = {"names": ["a"], "dtype_names": ["int32"], "shapes": [[1]], "transfer_id": "x"}
    with TIED.transfer(control) as transfer:
        transfer._transfer_id = "x"
        transfer._connect()
        control.start_update()
        with pytest.raises(ServerResponseError, match="a: dtype must be one of float32"):
            control.update_weights(info, timeout_s=20)
        TIED.push(transfer, 1)
    TIED.assert_served(server.base_url, 1)


def test_generating_inside_an_open_update_does_not_end_the_server(server, control):
    control.start_update()
    TIED.assert_served(server.base_url, 0)
    control.finish_update()
    TIED.assert_served(server.base_url, 0)


def resources(pid: int) -> dict[str, int]:
    """Descriptors, threads and resident KiB of a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "resident": int(fields["VmRSS"].split()[0]),
    }


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_hundred_pushes_leave_nothing_behind(server, control, shared_memory):
    pids = [os.getpid(), *server.pids()]
    with TIED.transfer(control, shared_memory=shared_memory) as transfer:
        for number in range(10):  # caches fill
            TIED.push(transfer, number % 2)
        before = {pid: resources(pid) for pid in pids}
        for number in range(100):
            TIED.push(transfer, number % 2)
        after = {pid: resources(pid) for pid in pids}
    TIED.assert_served(server.base_url, 1, "109")
    for pid in pids:
        assert after[pid]["threads"] <= before[pid]["threads"]
        assert after[pid]["descriptors"] <= before[pid]["descriptors"] + 2  # a connection being closed
        # A leaked push would be 100 times the 3 MB of the model.
        assert after[pid]["resident"] < before[pid]["resident"] + 24 * 1024

"""The weight-update cycle over real HTTP and TCP, with good trainers and bad ones."""

import contextlib
import dataclasses
import os
import socket
import threading

import numpy as np
import pytest

from ajgrpo.errors import ServerResponseError, WeightTransferError
from ajgrpo.hf import mapping
from ajgrpo.inference.protocol import SamplingParams
from ajgrpo.server.updates import UpdateError, WeightUpdates
from ajgrpo.weights import base
from ajgrpo.weights.base import HostInitInfo, TensorSpec
from ajgrpo.weights.host import HostWeightTransfer
from tests.server.models import CONFIG, PROMPT, params, token_log_probs

MANIFEST = mapping.checkpoint_manifest(CONFIG)
TOKEN = "00" * 16


def generate(engine, count=12):
    return (
        engine.submit(PROMPT, SamplingParams(max_tokens=count, seed=3, logprobs=1, ignore_eos=True))
        .result(60)
        .response()
    )


def assert_policy(engine, seed: int) -> None:
    out = generate(engine)
    np.testing.assert_allclose(out.log_probs, token_log_probs(PROMPT, out.token_ids, seed), atol=2e-5)


def push(transfer, seed: int, dtype=None) -> None:
    transfer.pause()
    transfer.send(mapping.iter_checkpoint(CONFIG, params(seed), dtype))
    transfer.resume()


@contextlib.contextmanager
def transport(control, manifest=MANIFEST, **kwargs):
    transfer = HostWeightTransfer(control, manifest, deadline_s=60, **kwargs)
    transfer.init()
    try:
        yield transfer
    finally:
        transfer.destroy()


@pytest.mark.parametrize("buffer_bytes", [1, 4096, base.DEFAULT_BUFFER_BYTES])
def test_pushed_weights_are_used_and_labelled(control, engine, buffer_bytes):
    with transport(control, buffer_bytes=buffer_bytes) as transfer:
        push(transfer, 1)
        assert engine.stats.version == "0"
        assert_policy(engine, 1)
        push(transfer, 0)
        assert_policy(engine, 0)
        assert generate(engine).weight_spans[0].version == "1"


def test_weights_pushed_back_give_the_same_bits(control, engine):
    first = generate(engine)
    with transport(control) as transfer:
        push(transfer, 1)
        push(transfer, 0)
    again = generate(engine)
    assert (again.token_ids, again.log_probs) == (first.token_ids, first.log_probs)


def test_bfloat16_on_the_wire(control, engine):
    with transport(control, mapping.checkpoint_manifest(CONFIG, "bfloat16")) as transfer:
        push(transfer, 1, "bfloat16")
    out = generate(engine)
    difference = np.abs(np.asarray(out.log_probs) - token_log_probs(PROMPT, out.token_ids, 1)).max()
    assert 1e-4 < difference < 0.5


def test_a_push_during_generation(control, engine):
    futures = [
        engine.submit(PROMPT, SamplingParams(max_tokens=120, seed=i, logprobs=1, ignore_eos=True)) for i in range(4)
    ]
    start = engine.stats.generation_tokens
    while engine.stats.generation_tokens < start + 40:
        threading.Event().wait(0.001)
    with transport(control) as transfer:
        push(transfer, 1)
    for future in futures:
        out = future.result(60).response()
        old, new = out.weight_spans
        assert (old.start, old.end, new.end) == (0, new.start, 120)
        cut = old.end
        log_probs = np.asarray(out.log_probs)
        np.testing.assert_allclose(log_probs[:cut], token_log_probs(PROMPT, out.token_ids, 0)[:cut], atol=2e-5)
        np.testing.assert_allclose(log_probs[cut:], token_log_probs(PROMPT, out.token_ids, 1)[cut:], atol=2e-5)


NORM = "model.norm.weight"


def changed_norm(**changes) -> list[TensorSpec]:
    return [dataclasses.replace(spec, **changes) if spec.name == NORM else spec for spec in MANIFEST]


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (changed_norm(shape=(31,)), r"misshaped \(1\): model.norm.weight: expected \(32,\), found \(31,\)"),
        (changed_norm(name="model.nrm.weight"), r"unexpected \(1\): model.nrm.weight"),
        ([spec for spec in MANIFEST if spec.name != NORM], r"missing \(1\): model.norm.weight"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_anything_is_sent(control, engine, manifest, text):
    asked_for = []

    def tensors():
        for spec in manifest:
            asked_for.append(spec.name)
            yield spec.name, np.zeros(spec.shape, np.float32)

    with transport(control, manifest) as transfer:
        with pytest.raises(WeightTransferError, match=text) as caught:
            transfer.pause()
            transfer.send(tensors())
        assert caught.value.phase == "update"
        assert asked_for == []
        assert control.is_paused()
    with transport(control) as transfer:  # a new trainer repairs
        push(transfer, 1)
    assert_policy(engine, 1)


def test_a_trainer_that_fails_in_the_middle_leaves_the_old_weights_and_repairs(control, engine):
    def broken():
        for count, item in enumerate(mapping.iter_checkpoint(CONFIG, params(1))):
            if count == 9:
                raise OverflowError("gather failed")
            yield item

    with transport(control, buffer_bytes=4096) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError, match="phase 'update': gather failed"):
            transfer.send(broken())
        engine.resume().result(10)  # the embedded server survives what would end vLLM
        assert_policy(engine, 0)
        assert engine.stats.version == "default"
        push(transfer, 1)
        assert engine.stats.version == "0"
        assert_policy(engine, 1)


def test_calls_out_of_order_have_vllms_status_and_text(control, engine):
    info = base.manifest_to_json(MANIFEST)
    with pytest.raises(ServerResponseError, match=r"500: start_weight_update must be called before update_weights."):
        control.update_weights(info)
    with pytest.raises(ServerResponseError, match="500: finish_weight_update called without a matching start"):
        control.finish_update("1")
    control.start_update()
    with pytest.raises(ServerResponseError, match=r"500: .*already active. Call finish_weight_update first."):
        control.start_update()
    control.finish_update("1")
    assert engine.stats.version == "1"
    assert_policy(engine, 0)
    fresh = WeightUpdates(engine)
    fresh.start()
    with pytest.raises(UpdateError, match="host weight transfer not initialized"):
        fresh.update(info)
    with pytest.raises(ServerResponseError, match="500: host weight transfer needs address and port"):
        control.init_transfer({})


def attempt(control, port: int, **info) -> str:
    """One update from a trainer at ``port``; returns the server's error and closes the session."""
    control.init_transfer(HostInitInfo("127.0.0.1", port, TOKEN, **info).to_json())
    control.start_update()
    with pytest.raises(ServerResponseError) as caught:
        control.update_weights(base.manifest_to_json(MANIFEST))
    control.finish_update()
    assert caught.value.status == 500
    return caught.value.message


def test_no_trainer_listens(control, engine):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "Connection refused" in attempt(control, port)
    assert_policy(engine, 0)


def test_a_trainer_killed_in_the_middle_of_a_chunk(control, engine):
    total = sum(spec.nbytes for spec in MANIFEST)

    def trainer(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(base.HELLO.size, socket.MSG_WAITALL)
            connection.sendall(base.FRAME.pack(base.CHUNK, total) + bytes(1000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trainer, args=(listener,))
        thread.start()
        message = attempt(control, listener.getsockname()[1])
        thread.join()
    assert f"closed the connection after 1000 of {total} bytes" in message
    assert_policy(engine, 0)


def test_a_silent_trainer_times_out(control, engine):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert "timed out" in attempt(control, listener.getsockname()[1], io_timeout_s=0.05)
    assert_policy(engine, 0)


def test_thirty_pushes_leak_nothing(control, engine):
    """Trainer and server share this process, so this counts both."""

    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with transport(control) as transfer:
        for _ in range(10):  # the HTTP server's thread pool fills up
            push(transfer, 1)
        before = resources()
        for _ in range(30):
            push(transfer, 0)
        after = resources()
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 1
    assert engine.stats.version == "39"

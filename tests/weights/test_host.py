"""The transport against a hand-written server: what is called in which order, and what a failure leaves behind."""

import contextlib
import socket
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ajgrpo.errors import ServerResponseError, ServerTimeoutError, WeightTransferError
from ajgrpo.weights import base
from ajgrpo.weights.base import HostInitInfo, TensorSpec
from ajgrpo.weights.host import HostWeightTransfer, local_address

MANIFEST = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "bfloat16"), TensorSpec("c", (0,), "float16")]
ARRAYS = [
    ("a", np.arange(6, dtype=np.float32).reshape(3, 2).T),  # not contiguous
    ("b", jnp.asarray([1, 2, 3, 4], jnp.bfloat16)),
    ("c", np.zeros(0, np.float16)),
]
EXPECTED = {
    "a": [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]],
    "b": [1.0, 2.0, 3.0, 4.0],
    "c": [],
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class FakeServer:
    """Has the methods of ControlClient that the transport uses. ``broken`` maps a method to what it raises."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, workers: int = 1, paused: bool = False):
        self.workers, self.paused, self.session = workers, paused, False
        self.calls: list[str] = []
        self.versions: list[str | None] = []
        self.received: list[dict] = []
        self.broken: dict[str, Exception] = {}
        self.bounds: list[float] = []
        self.failing_rank: int | None = None

    def _call(self, name: str, timeout_s: float | None = None) -> None:
        self.calls.append(name)
        if timeout_s is not None:
            self.bounds.append(timeout_s)
        if name in self.broken:
            raise self.broken.pop(name)

    def world_size(self) -> int:
        return self.workers

    def is_paused(self, *, timeout_s=None) -> bool:
        return self.paused

    def pause(self, *, timeout_s=None) -> None:
        self._call("pause", timeout_s)

    def resume(self, *, timeout_s=None) -> None:
        self._call("resume", timeout_s)

    def init_transfer(self, info, *, timeout_s=None) -> None:
        self._call("init", timeout_s)
        self.info = HostInitInfo.from_json(info)

    def start_update(self, *, timeout_s=None) -> None:
        self._call("start", timeout_s)
        if self.session:
            raise error("already active")
        self.session = True

    def finish_update(self, version=None, *, timeout_s=None) -> None:
        self._call("finish", timeout_s)
        if not self.session:
            raise error("without a matching start")
        self.session = False
        self.versions.append(version)

    def update_weights(self, info, *, timeout_s=None) -> None:
        self._call("update", timeout_s)
        tensors: list[dict] = [{} for _ in range(self.workers)]
        failures: list[Exception] = []

        def work(rank: int) -> None:
            try:
                with base.receiving(self.info, info, rank) as received:
                    for spec, raw in received:
                        tensors[rank][spec.name] = raw.view(DTYPES[spec.dtype]).reshape(spec.shape)
                    if rank == self.failing_rank:
                        raise RuntimeError("out of memory")
            except RuntimeError:
                return  # as vLLM with several workers: the reply says nothing
            except (OSError, ValueError, base.TransferError) as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise error(str(failures[0]))
        self.received += tensors


def error(message: str) -> ServerResponseError:
    return ServerResponseError("POST /x", 500, message)


@contextlib.contextmanager
def connected(server: FakeServer, **kwargs):
    transfer = HostWeightTransfer(server, MANIFEST, **({"deadline_s": 30.0, "buffer_bytes": 24} | kwargs))
    transfer.init()
    try:
        yield transfer
    finally:
        transfer.destroy()
        transfer.destroy()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_two_cycles_with_two_workers(shared_memory):
    server = FakeServer(workers=2)
    with connected(server, shared_memory=shared_memory) as transfer:
        for _ in range(2):
            transfer.pause()
            transfer.send(iter(ARRAYS))
            transfer.resume()
            assert transfer.used_shared_memory is shared_memory
            assert list(transfer.phase_seconds) == ["pause", "start", "update", "finish", "resume"]
    assert server.calls == ["init", *["pause", "start", "update", "finish", "resume"] * 2]
    assert server.versions == ["0", "1"]
    assert [{name: array.tolist() for name, array in received.items()} for received in server.received] == [
        EXPECTED
    ] * 4


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (ARRAYS[:2], "the tensors end before 'c' of the manifest"),
        ([*ARRAYS, ARRAYS[0]], "tensor 'a' comes after the end of the manifest"),
        ([("x", ARRAYS[0][1]), *ARRAYS[1:]], "the trainer's next tensor is TensorSpec(name='x'"),
        ([("a", np.zeros((3, 2), np.float32)), *ARRAYS[1:]], "shape=(3, 2)"),
        ([("a", np.zeros((2, 3), np.float16)), *ARRAYS[1:]], "dtype='float16'"),
    ],
)
def test_tensors_that_do_not_match_the_manifest_end_the_push_with_the_cause(arrays, text):
    server = FakeServer()
    with connected(server) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError) as caught:
            transfer.send(arrays)
        assert caught.value.phase == "update"
        assert text in str(caught.value)
        assert server.calls[-1] == "update"


def test_an_error_while_producing_tensors_reaches_the_caller():
    def arrays():
        yield ARRAYS[0]
        raise MemoryError("no room for b")

    with connected(FakeServer()) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError, match="phase 'update': no room for b") as caught:
            transfer.send(arrays())
        assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("phase", ["pause", "start", "update", "finish", "resume"])
def test_the_failing_phase_is_named_and_the_next_push_repairs(phase):
    server = FakeServer()
    with connected(server) as transfer:
        server.broken[phase] = error(f"{phase} broke")
        with pytest.raises(WeightTransferError, match=f"phase '{phase}': .*{phase} broke") as caught:
            transfer.pause()
            transfer.send(ARRAYS)
            transfer.resume()
        assert caught.value.phase == phase
        if phase in ("update", "finish"):
            with pytest.raises(WeightTransferError, match="phase 'resume': the last push did not finish"):
                transfer.resume()
            assert server.calls[-1] != "resume"
        server.calls.clear()
        transfer.pause()
        transfer.send(ARRAYS)
        transfer.resume()
    # Only a session that may be open is closed first, and the server told of the new listener.
    repair = ["init", "finish"] if phase in ("update", "finish") else []
    assert server.calls == ["pause", *repair, "start", "update", "finish", "resume"]
    assert server.versions[-1] == ("1" if phase == "resume" else "0")
    assert {name: array.tolist() for name, array in server.received[-1].items()} == EXPECTED


def test_a_server_found_paused_is_repaired_by_the_first_push():
    server = FakeServer(paused=True)
    server.session = True  # an earlier trainer died in the middle
    with connected(server) as transfer:
        transfer.pause()
        transfer.send(ARRAYS)
        transfer.resume()
    assert server.calls == ["init", "pause", "init", "finish", "start", "update", "finish", "resume"]
    assert server.versions == [None, "0"]


def test_a_server_error_ends_the_push_although_nobody_connects():
    server = FakeServer()
    server.broken["update"] = error("manifest refused")
    with connected(server, deadline_s=300.0) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError, match="manifest refused"):
            transfer.send(ARRAYS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ajgrpo-weights")]


def test_a_worker_that_fails_behind_a_good_reply_ends_the_push_and_the_next_one_repairs():
    server = FakeServer(workers=2)
    server.failing_rank = 1
    with connected(server) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError, match="server worker 1: out of memory"):
            transfer.send(ARRAYS)
        assert server.calls[-1] == "update"
        server.failing_rank = None
        transfer.send(ARRAYS)
        transfer.resume()
    assert server.versions == [None, "0"]


def test_several_workers_in_an_unknown_state_are_not_touched():
    with connected(FakeServer(workers=2, paused=True)) as transfer:
        transfer.pause()
        with pytest.raises(WeightTransferError, match=r"has 2 workers.*restart the server"):
            transfer.send(ARRAYS)


def test_a_second_trainer_takes_over_and_the_first_one_is_told():
    server = FakeServer()
    with connected(server) as first, connected(server) as second:
        first.pause()
        with pytest.raises(WeightTransferError, match=r"phase 'update': .*two trainers use this server"):
            first.send(ARRAYS)
        second.pause()
        second.send(ARRAYS)  # closes the session that the first one left
        second.resume()
    assert server.versions == [None, "0"]


def test_strangers_on_the_listener_are_turned_away():
    server = FakeServer()
    with (
        connected(server) as transfer,
        socket.create_connection((server.info.address, server.info.port)) as stranger,
    ):
        stranger.sendall(base.HELLO.pack(base.MAGIC, 0, b"\0" * base.TOKEN_BYTES, False))
        transfer.pause()
        transfer.send(ARRAYS)
        assert stranger.recv(1) == b""
    assert len(server.received) == 1


def test_one_deadline_bounds_the_whole_push():
    server = FakeServer()
    with connected(server, deadline_s=20.0) as transfer:
        server.bounds.clear()
        transfer.pause()
        transfer.send(ARRAYS)
        transfer.resume()
    assert server.bounds == sorted(server.bounds, reverse=True)
    assert max(server.bounds) <= 20.0
    with connected(FakeServer(), deadline_s=20.0) as transfer:
        transfer.pause()
        transfer._deadline -= 20.0
        with pytest.raises(WeightTransferError, match=r"phase 'start': the push took longer than 20 s \(vllm_server_t"):
            transfer.send(ARRAYS)


def test_timeouts_carry_the_phase():
    server = FakeServer()
    with connected(server) as transfer:
        server.broken["pause"] = ServerTimeoutError("POST /pause: no reply")
        with pytest.raises(WeightTransferError, match="phase 'pause': POST /pause: no reply"):
            transfer.pause()


def test_the_address_is_the_one_on_the_way_to_the_server():
    assert local_address("http://localhost:8000") == "127.0.0.1"
    assert local_address("http://127.0.0.1:8000/") == "127.0.0.1"
    with pytest.raises(WeightTransferError, match=r"no way to the server's host 'nowhere\.invalid'"):
        local_address("http://nowhere.invalid:8000")

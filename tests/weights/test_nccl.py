"""The transport against a stand-in communicator that behaves as NCCL does: ordered, blocking, patient with peers."""

import base64
import queue
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ajgrpo.errors import ServerResponseError, WeightTransferError
from ajgrpo.weights import base
from ajgrpo.weights.base import TensorSpec
from ajgrpo.weights.nccl import NUM_BUFFERS, UNIQUE_ID_BYTES, NcclWeightTransfer, device_bits

MANIFEST = [
    TensorSpec("a", (2, 3), "float32"),
    TensorSpec("b", (4,), "bfloat16"),
    TensorSpec("c", (3,), "float32"),
    TensorSpec("d", (5,), "float32"),
]
ARRAYS = [
    ("a", jnp.arange(6, dtype=jnp.float32).reshape(3, 2).T),
    ("b", jnp.asarray([1, 2, 3, 4], jnp.bfloat16)),
    ("c", jnp.asarray([0.5, -0.0, 7.0], jnp.float32)),
    ("d", jnp.ones(5, jnp.float32)),
]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
BOUND_S = 20.0


class Fabric:
    """What ranks of one unique id share. A rank that waits for an absent one waits until the fabric is aborted."""

    def __init__(self):
        self.world_size = 0
        self.joined = threading.Barrier(1)
        self.streams: list[queue.Queue] = []
        self.aborted = threading.Event()
        self.num_reduced = 0

    def open(self, world_size):
        self.world_size = world_size
        self.joined = threading.Barrier(world_size)
        self.streams = [queue.Queue() for _ in range(world_size)]


class StandIn:
    """``Link`` in memory. ``log`` gets every operation in its order."""

    def __init__(self, fabrics, log, version="2.27.3"):
        self.fabrics, self.log, self.version = fabrics, log, version
        self.fabric = Fabric()
        self.buffers = [bytearray() for _ in range(NUM_BUFFERS)]
        self.unread = [0] * NUM_BUFFERS
        self.num_aborts = 0

    def library_version(self):
        return self.version

    def unique_id(self):
        unique_id = bytes([len(self.fabrics) % 256]) * UNIQUE_ID_BYTES
        self.fabrics[unique_id] = self.fabric
        self.log.append("id")
        return unique_id

    def connect(self, unique_id, world_size):
        self.fabric.open(world_size)
        self.log.append("join")
        self.fabric.joined.wait(BOUND_S)
        self.fabric.num_reduced += 1

    def pack(self, buffer, offset, nbytes, array):
        assert array.dtype in (jnp.uint16, jnp.uint32)
        if offset == 0:
            self.buffers[buffer] = bytearray(nbytes)
        data = np.asarray(array).tobytes()
        self.buffers[buffer][offset : offset + len(data)] = data
        self.log.append(f"pack {buffer}")

    def broadcast(self, buffer, nbytes):
        taken = threading.Semaphore(0)
        for stream in self.fabric.streams[1:]:
            stream.put((bytes(self.buffers[buffer][:nbytes]), taken))
        self.unread[buffer] = (taken, self.fabric.world_size - 1)
        self.log.append(f"broadcast {buffer}")

    def busy(self, buffer):
        if self.fabric.aborted.is_set():
            raise RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: aborted")
        if not self.unread[buffer]:
            return False
        taken, count = self.unread[buffer]
        while count and taken.acquire(blocking=False):
            count -= 1
        self.unread[buffer] = (taken, count) if count else 0
        if not count:
            self.log.append(f"done {buffer}")
        return bool(count)

    def abort(self):
        self.num_aborts += 1
        self.fabric.aborted.set()
        self.fabric.joined.abort()


class FakeServer:
    """The control calls, and workers that behave like vLLM's: they take what the manifest says, chunk by chunk."""

    def __init__(self, workers=2, version="0.32.0", library="2.27.3"):
        self.workers, self.server_version, self.library = workers, version, library
        self.fabrics, self.log = {}, []
        self.received = []
        self.session = False
        self.broken = {}

    def world_size(self):
        return self.workers

    def is_paused(self, *, timeout_s=None):
        return False

    def version(self):
        return self.server_version

    def nccl_version(self):
        return self.library

    def _call(self, name):
        self.log.append(name)
        if name in self.broken:
            raise self.broken.pop(name)

    def pause(self, *, timeout_s=None):
        self._call("pause")

    def resume(self, *, timeout_s=None):
        self._call("resume")

    def start_update(self, *, timeout_s=None):
        self._call("start")
        self.session = True

    def finish_update(self, version=None, *, timeout_s=None):
        self._call("finish")
        self.session = False

    def init_transfer(self, info, *, timeout_s=None):
        self._call("init")
        assert (info["rank_offset"], info["world_size"], info["packed_num_buffers"]) == (1, self.workers + 1, 2)
        assert "master_address" not in info
        self.info = info
        self.fabric = self.fabrics[base64.b64decode(info["nccl_unique_id_b64"])]
        while not self.fabric.streams:  # every rank joins; the order does not matter
            threading.Event().wait(0.001)

        def join():
            try:
                self.fabric.joined.wait(BOUND_S)
            except threading.BrokenBarrierError:
                return

        self._run([join] * self.workers)

    def update_weights(self, info, *, timeout_s=None):
        self._call("update")
        specs = base.manifest_from_json(info)
        results = [{} for _ in range(self.workers)]
        failures = []

        def work(rank):
            for chunk in base.split_chunks([spec.nbytes for spec in specs], self.info["packed_buffer_size_bytes"]):
                while True:
                    if self.fabric.aborted.is_set():
                        failures.append("NCCL error: remote process exited or there was a network error")
                        return
                    try:
                        data, taken = self.fabric.streams[rank + 1].get(timeout=0.01)
                    except queue.Empty:
                        continue
                    break
                assert len(data) == chunk.nbytes
                offset = 0
                for spec in specs[chunk.start : chunk.stop]:
                    raw = np.frombuffer(data[offset : offset + spec.nbytes], DTYPES[spec.dtype])
                    results[rank][spec.name] = raw.reshape(spec.shape)
                    offset += spec.nbytes
                taken.release()

        self._run([lambda rank=rank: work(rank) for rank in range(self.workers)])
        if failures:
            raise ServerResponseError("POST /update_weights", 500, failures[0])
        self.received += results

    @staticmethod
    def _run(functions):
        threads = [threading.Thread(target=function) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def transfer_to(server, **kwargs):
    links = []

    def make():
        links.append(StandIn(server.fabrics, server.log, **({"version": kwargs["ours"]} if "ours" in kwargs else {})))
        return links[-1]

    options = {"deadline_s": 30.0, "buffer_bytes": 20, "gathers": kwargs.get("gathers", False)}
    return NcclWeightTransfer(server, MANIFEST, make_link=make, **options), links


def push(transfer, arrays=None):
    transfer.pause()
    transfer.send(iter(ARRAYS if arrays is None else arrays))
    transfer.resume()


@pytest.mark.parametrize("gathers", [False, True])
def test_two_pushes_arrive_byte_for_byte_at_every_worker(gathers):
    server = FakeServer()
    transfer, links = transfer_to(server, gathers=gathers)
    transfer.init()
    push(transfer)
    push(transfer)
    assert links[0].fabric.num_reduced == 1
    assert len(server.received) == 4
    for tensors in server.received:
        assert list(tensors) == [spec.name for spec in MANIFEST]
        for name, array in ARRAYS:
            assert tensors[name].tobytes() == np.asarray(array).tobytes()
    transfer.destroy()
    transfer.destroy()
    assert links[0].num_aborts == 1


def test_a_chunk_is_packed_while_the_one_before_is_under_way_unless_parameters_are_gathered():
    for gathers in (False, True):
        server = FakeServer(workers=1)
        transfer, _ = transfer_to(server, gathers=gathers)
        transfer.init()
        server.log.clear()
        push(transfer)
        flying = set()
        for entry in server.log:
            kind, _, buffer = entry.partition(" ")
            if kind == "pack":
                assert buffer not in flying, "a buffer was overwritten while it was being sent"
                assert not (gathers and flying), "a parameter was gathered during a broadcast"
            elif kind == "broadcast":
                flying.add(buffer)
            elif kind == "done":
                flying.discard(buffer)
        assert not flying
        transfer.destroy()


def test_packing_overlaps_a_broadcast_that_is_not_yet_taken():
    link = StandIn({}, log := [])
    link.fabric.open(2)
    transfer = NcclWeightTransfer(None, MANIFEST, deadline_s=0.2, make_link=lambda: link, buffer_bytes=20)
    with pytest.raises(TimeoutError, match="a broadcast did not end"):  # the peer takes nothing
        transfer._send_all(link, iter(ARRAYS), deadline=0.0)
    assert log == ["pack 0", "broadcast 0", "pack 1", "pack 1", "pack 1", "broadcast 1"]
    assert link.num_aborts == 1


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (ARRAYS[:3], "the tensors end before 'd'"),
        ([*ARRAYS, ARRAYS[0]], "tensor 'a' comes after the end"),
        ([("x", ARRAYS[0][1]), *ARRAYS[1:]], r"next tensor is TensorSpec\(name='x'"),
        ([("a", jnp.zeros((3, 2))), *ARRAYS[1:]], r"shape=\(3, 2\)"),
    ],
)
def test_a_wrong_tensor_ends_both_sides_and_the_next_push_has_a_new_communicator(arrays, text):
    server = FakeServer(workers=1)
    transfer, links = transfer_to(server)
    transfer.init()
    with pytest.raises(WeightTransferError, match=text) as caught:
        push(transfer, arrays)
    assert caught.value.phase == "update"
    with pytest.raises(WeightTransferError, match="push again first"):
        transfer.resume()
    push(transfer)
    assert len(links) == 2
    assert links[0].num_aborts >= 1
    assert len(server.received) >= 1
    transfer.destroy()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ajgrpo-nccl")]


def test_an_error_of_the_server_ends_the_push_with_its_text():
    server = FakeServer(workers=1)
    transfer, links = transfer_to(server)
    transfer.init()
    server.broken["update"] = ServerResponseError("POST /update_weights", 500, "out of memory")
    with pytest.raises(WeightTransferError, match=r"phase 'update': .*out of memory"):
        push(transfer)
    assert links[0].num_aborts >= 1
    push(transfer)
    transfer.destroy()


def test_an_error_of_the_server_while_joining():
    server = FakeServer()
    transfer, links = transfer_to(server)
    server.broken["init"] = ServerResponseError("POST /init_weight_transfer_engine", 500, "no NCCL here")
    with pytest.raises(WeightTransferError, match=r"phase 'init': .*no NCCL here"):
        transfer.init()
    assert links[0].num_aborts == 1


def test_a_server_that_answers_without_taking_part_does_not_hang_the_trainer(monkeypatch):
    monkeypatch.setattr("ajgrpo.weights.nccl.REPLY_GRACE_S", 0.1)
    server = FakeServer()
    server.update_weights = lambda info, timeout_s=None: None
    transfer, _ = transfer_to(server)
    transfer.init()
    with pytest.raises(WeightTransferError, match="still waiting"):
        push(transfer)


@pytest.mark.parametrize(("version", "phase"), [("0.29.0", "vLLM 0.29.0.*install vLLM 0.30")])
def test_servers_that_know_no_unique_id_are_refused(version, phase):
    transfer, links = transfer_to(FakeServer(version=version))
    with pytest.raises(WeightTransferError, match=phase):
        transfer.init()
    assert links == []


def test_library_versions_are_compared_where_both_are_known():
    transfer, _ = transfer_to(FakeServer(), ours="2.26.2")
    with pytest.raises(WeightTransferError, match=r"NCCL is 2.26.2 here and 2.27.3 in the server"):
        transfer.init()
    transfer, _ = transfer_to(FakeServer(library=None), ours="2.26.2")
    transfer.init()
    transfer.destroy()


def test_bits_of_sharded_arrays_are_those_of_the_whole():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
    whole = jnp.arange(8, dtype=jnp.bfloat16)
    sharded = jax.device_put(whole, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    bits = device_bits(TensorSpec("a", (8,), "bfloat16"), ("a", sharded))
    assert len(bits.sharding.device_set) == 1
    assert np.asarray(bits).tobytes() == np.asarray(whole).tobytes()


def test_without_cupy_the_extra_is_named():
    transfer = NcclWeightTransfer(FakeServer(), MANIFEST, deadline_s=5.0)
    with pytest.raises(WeightTransferError, match=r"ajgrpo\[cuda12\]"):
        transfer.init()

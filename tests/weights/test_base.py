import os
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajgrpo.weights import base
from ajgrpo.weights.base import Chunk, HostInitInfo, TensorSpec, TransferError

TOKEN = "00112233445566778899aabbccddeeff"
SPECS = [TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (0,), "float16"), TensorSpec("c", (5,), "bfloat16")]
DATA = np.arange(34, dtype=np.uint8)


def test_a_chunk_closes_when_it_is_larger_than_the_buffer():
    assert list(base.split_chunks([4, 4, 4], 8)) == [Chunk(0, 3, 12)]
    assert list(base.split_chunks([4, 4, 4], 7)) == [Chunk(0, 2, 8), Chunk(2, 3, 4)]
    assert list(base.split_chunks([4, 4], 0)) == [Chunk(0, 1, 4), Chunk(1, 2, 4)]
    assert list(base.split_chunks([], 8)) == []


@given(st.lists(st.integers(0, 50)), st.integers(0, 60))
def test_chunks_cover_the_manifest_in_order(sizes, buffer):
    chunks = list(base.split_chunks(sizes, buffer))
    assert [i for chunk in chunks for i in range(chunk.start, chunk.stop)] == list(range(len(sizes)))
    assert [chunk.nbytes for chunk in chunks] == [sum(sizes[chunk.start : chunk.stop]) for chunk in chunks]
    for chunk in chunks:
        assert sum(sizes[chunk.start : chunk.stop - 1]) <= buffer


def test_manifest_survives_the_wire():
    assert [spec.nbytes for spec in SPECS] == [24, 0, 10]
    info = base.manifest_to_json(SPECS)
    assert info == {
        "names": ["a", "b", "c"],
        "dtype_names": ["float32", "float16", "bfloat16"],
        "shapes": [[2, 3], [0], [5]],
    }
    assert base.manifest_from_json(info) == SPECS


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"names": ["a", "b"]}, "same length"),
        ({"names": ["a", "b", "a"]}, "duplicate names"),
        ({"dtype_names": ["float32", "int32", "float32"]}, "b: dtype must be one of float32, bfloat16, float16"),
        ({"shapes": [[2, 3], [0], [-5]]}, "c: bad shape"),
        ({"shapes": None}, "needs the list 'shapes'"),
    ],
)
def test_bad_manifests_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        base.manifest_from_json(base.manifest_to_json(SPECS) | change)


def test_init_info_survives_the_wire_and_is_checked():
    info = HostInitInfo("127.0.0.1", 1234, TOKEN, packed_buffer_size_bytes=7)
    assert HostInitInfo.from_json(info.to_json() | {"rank_offset": 0}) == info
    for change, text in (
        ({"port": 0}, "needs address and port"),
        ({"token": "ab"}, "16 bytes of hex"),
        ({"token": "xy"}, "non-hexadecimal"),
    ):
        with pytest.raises(ValueError, match=text):
            HostInitInfo.from_json(info.to_json() | change)


def receive(script, *, fail=None, **info_fields):
    """What ``receiving`` yields from a trainer that runs ``script(connection)``.

    Returns the tensors, the hello, and all that the trainer got after it. ``fail`` is raised once all is received.
    """
    got = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trainer():
            connection, _ = listener.accept()
            with connection:
                got.append(base.HELLO.unpack(connection.recv(base.HELLO.size, socket.MSG_WAITALL)))
                script(connection)
                connection.shutdown(socket.SHUT_WR)
                got.append(b"".join(iter(lambda: connection.recv(4096), b"")))

        thread = threading.Thread(target=trainer)
        thread.start()
        port = listener.getsockname()[1]
        fields = {"packed_buffer_size_bytes": 20, "io_timeout_s": 5.0, "transfer_id": "one"} | info_fields
        info = HostInitInfo("127.0.0.1", port, TOKEN, **fields)
        try:
            with base.receiving(info, base.manifest_to_json(SPECS) | {"transfer_id": "one"}, rank=3) as tensors:
                received = list(tensors)
                if fail is not None:
                    raise fail
        finally:
            thread.join()
            receive.reply = got[1]
    return received, *got


def send(*parts):
    return lambda connection: [connection.sendall(part) for part in parts]


def frame(kind, size):
    return base.FRAME.pack(kind, size)


def test_tensors_arrive_chunk_by_chunk():
    parts = (frame(b"CHNK", 24), DATA[:24], frame(b"CHNK", 10), DATA[24:], frame(b"DONE", 34))
    tensors, hello, reply = receive(send(*parts))
    assert hello == (b"AJG2", 3, bytes.fromhex(TOKEN), False)
    assert reply == frame(b"OKAY", 0)
    assert [spec for spec, _ in tensors] == SPECS
    assert [raw.tolist() for _, raw in tensors] == [list(range(24)), [], list(range(24, 34))]


def shared_memory(token):
    """The descriptor of a file like the trainer's: token, then two slots of 24 bytes."""
    fd = os.memfd_create("test")
    os.write(fd, token)
    os.pwrite(fd, DATA[:24].tobytes(), base.SLOTS_OFFSET)
    os.pwrite(fd, DATA[24:].tobytes(), base.SLOTS_OFFSET + 24)
    return fd


def test_tensors_arrive_through_shared_memory():
    fd = shared_memory(bytes.fromhex(TOKEN))
    try:
        parts = (frame(b"SHMC", 24), frame(b"SHMC", 10), frame(b"DONE", 34))
        tensors, hello, reply = receive(send(*parts), shared_pid=os.getpid(), shared_fd=fd, slot_bytes=24)
    finally:
        os.close(fd)
    assert hello[3] is True
    assert reply == frame(b"TAKN", 24) + frame(b"TAKN", 10) + frame(b"OKAY", 0)
    assert [raw.tolist() for _, raw in tensors] == [list(range(24)), [], list(range(24, 34))]


@pytest.mark.parametrize("where", ["another process's memory", "closed", "pipe"])
def test_shared_memory_that_is_not_the_trainers_is_not_used(where):
    fd = shared_memory(b"x" * 16)
    reader, writer = os.pipe()
    number = {"another process's memory": fd, "closed": 9999, "pipe": reader}[where]
    try:
        parts = (frame(b"CHNK", 24), DATA[:24], frame(b"CHNK", 10), DATA[24:], frame(b"DONE", 34))
        tensors, hello, _ = receive(send(*parts), shared_pid=os.getpid(), shared_fd=number, slot_bytes=24)
        with pytest.raises(TransferError, match="could not open"):
            receive(send(frame(b"SHMC", 24)), shared_pid=os.getpid(), shared_fd=number, slot_bytes=24)
    finally:
        for descriptor in (fd, reader, writer):
            os.close(descriptor)
    assert hello[3] is False
    assert len(tensors) == 3


def test_the_trainer_is_told_why_the_worker_failed():
    parts = (frame(b"CHNK", 24), DATA[:24], frame(b"CHNK", 10), DATA[24:], frame(b"DONE", 34))
    with pytest.raises(KeyError):
        receive(send(*parts), fail=KeyError("no such layer"))
    assert receive.reply == frame(b"FAIL", 15) + b"'no such layer'"


def test_an_update_of_another_trainer_is_refused_before_connecting():
    info = HostInitInfo("127.0.0.1", 9, TOKEN, transfer_id="one")
    with pytest.raises(ValueError, match="two trainers use this server"), base.receiving(info, {"transfer_id": "two"}):
        pytest.fail("not reached")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((frame(b"CHNK", 25),), r"packed chunk mismatch for tensors 0..0 \(a .. a\): .* CHNK 24 .* sends CHNK 25"),
        ((frame(b"DONE", 24),), "sends DONE 24"),
        ((frame(b"ABRT", 0),), "the trainer aborted the transfer"),
        ((frame(b"CHNK", 24), DATA[:20]), "closed the connection after 20 of 24 bytes"),
        ((frame(b"CHNK", 24), DATA[:24], frame(b"CHNK", 10), DATA[24:]), "closed the connection after 0 of 12"),
        ((frame(b"CHNK", 24), DATA[:24], frame(b"CHNK", 10), DATA[24:], frame(b"DONE", 35)), "end of transfer"),
    ],
)
def test_streams_that_do_not_match_are_refused(parts, text):
    with pytest.raises(TransferError, match=text):
        receive(send(*parts))


def test_a_silent_trainer_runs_into_the_bound():
    done = threading.Event()
    timer = threading.Timer(3.0, done.set)
    timer.start()
    with pytest.raises(TimeoutError, match="timed out"):
        receive(lambda connection: connection.recv(1), io_timeout_s=0.05)
    assert not done.is_set()
    timer.cancel()

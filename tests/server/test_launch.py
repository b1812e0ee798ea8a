"""The server as a process: start, readiness, failures, and that it never outlives the process that started it."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import pytest

from ajgrpo import serve
from ajgrpo.errors import ConfigError, ServerError, ServerTimeoutError
from ajgrpo.inference.client import ControlClient
from ajgrpo.server.launch import EmbeddedServer
from tests.server.models import CONFIG, write_model

PARENT = """
import sys
from ajgrpo.server.launch import EmbeddedServer
server = EmbeddedServer(sys.argv[1], log_path=sys.argv[2], max_num_seqs=2)
print(server.start(), server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> pathlib.Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that only waits to be reaped."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_start_answer_stop(model_dir, tmp_path):
    with EmbeddedServer(
        model_dir, log_path=tmp_path / "logs" / "server.log", served_model_name="tiny", max_model_len=64, max_num_seqs=3
    ) as server:
        assert not server.alive()
        url = server.start(120)
        assert server.alive()
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)  # a Ctrl-C in the terminal does not reach it
        with contextlib.closing(ControlClient(url, timeout_s=30)) as control:
            control.wait_until_ready(30, server.alive)
            assert control.models() == ("tiny", 64)
            assert control.server_info()["scheduler_config"]["max_num_seqs"] == 3
        pid = server.pid
    assert not server.alive()
    assert ended(pid)
    server.stop()
    assert (tmp_path / "logs" / "server.log").read_text() == ""


def test_the_server_ends_with_its_parent(model_dir, tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        pid = int(parent.stdout.readline().split()[1])
        assert not ended(pid)
        parent.send_signal(signal.SIGKILL)
    waiting = threading.Event()
    for _ in range(150):
        if ended(pid):
            return
        waiting.wait(0.1)
    raise AssertionError("the server outlived its parent")


def test_a_taken_port_is_named_with_its_flag(model_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use; set another --port"):
            serve.listen("127.0.0.1", port)
        server = EmbeddedServer(model_dir, log_path=tmp_path / "log", port=port)
        with pytest.raises(ServerError, match=f"(?s)ended while starting.*error: port {port} on 127.0.0.1 is in use"):
            server.start(60)
    assert not server.alive()


def test_a_failed_start_shows_the_log(tmp_path):
    server = EmbeddedServer(tmp_path / "nothing", log_path=tmp_path / "log")
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*log:.*error: .*nothing"):
        server.start(60)
    assert "Traceback" not in server.log_tail()


def test_a_start_that_takes_too_long_is_stopped(model_dir, tmp_path):
    server = EmbeddedServer(model_dir, log_path=tmp_path / "log")
    with pytest.raises(ServerTimeoutError, match=r"not ready within 0.01 s; the end of .*log:\n\(empty log\)"):
        server.start(0.01)
    assert not server.alive()


def test_the_context_length_is_checked_against_the_model():
    assert serve.context_length(None, CONFIG) == 512
    assert serve.context_length(512, CONFIG) == 512
    with pytest.raises(ConfigError, match="--max-model-len must be from 2 to 512 for this model, got 513"):
        serve.context_length(513, CONFIG)


def test_the_command_line_needs_no_heavy_import():
    code = "import sys, ajgrpo.serve as s; s.parser(); assert not {'jax', 'numpy', 'uvicorn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""A real ``vllm serve`` on the CPU as a child process."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from ajgrpo.inference.client import ControlClient

ROOT = pathlib.Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
MODEL_NAME = "tiny"

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLMServer:
    """Starts the server of the environment in ``python``'s directory; a context manager.

    Args:
        python: interpreter of the server's environment.
        model_dir: the model.
        log_path: where its output goes.
        flags: further command-line flags.
        environment: further environment variables.
        scale_out: offer ``/inference/v1/generate``.
    """

    def __init__(
        self,
        python: pathlib.Path,
        model_dir: pathlib.Path,
        log_path: pathlib.Path,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        scale_out: bool = True,
    ):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.log_path, self.base_url = log_path, f"http://127.0.0.1:{port}"
        self._command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model_dir), "--served-model-name", MODEL_NAME,
            "--weight-transfer-config", '{"backend": "host"}', "--logprobs-mode", "processed_logprobs",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
            "--max-model-len", "512", "--enforce-eager", *(["--enable-scale-out"] if scale_out else []), *flags,
        ]  # fmt: skip
        # The entry point is that of the installed package; its code is this checkout's.
        paths = {"PYTHONPATH": str(ROOT), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        self._environment = inherited | ENVIRONMENT | paths | dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VLLMServer:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        control = ControlClient(self.base_url, timeout_s=START_TIMEOUT_S)
        try:
            control.wait_until_ready(START_TIMEOUT_S, still_alive=lambda: self.process.poll() is None)
        except BaseException:
            self.stop()
            print(self.log_path.read_text(errors="replace")[-8000:])
            raise
        finally:
            control.close()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def pids(self) -> list[int]:
        """The server's processes: those of its session, so also children whose parent has ended."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended while we looked
                continue
            if self.process is not None and int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL to all its processes at once."""
        self._signal_all(9)
        self._wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the server, gently first."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self._wait(STOP_TIMEOUT_S)
        except TimeoutError:
            self._signal_all(9)
            self._wait(STOP_TIMEOUT_S)

    def _signal_all(self, signal: int) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal)
            except ProcessLookupError:
                continue

    def _wait(self, timeout_s: float) -> None:
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None or self.pids():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server's processes {self.pids()} did not end within {timeout_s:g} s")
            time.sleep(0.05)

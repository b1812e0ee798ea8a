"""Starts the embedded server as a process of its own, and makes sure that it ends.

The process leads its own session, so that a Ctrl-C in the terminal reaches the trainer first, which then stops the
server in order. The trainer holds the write end of the server's standard input: when the trainer ends, however it
ends, the server reads end-of-file and ends too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ajgrpo.errors import ServerError, ServerTimeoutError

READY_PREFIX = "ajgrpo server ready at "
"""The one line on the server's standard output, followed by its address."""

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
LOG_LINES = 20


class EmbeddedServer:
    """The embedded server's process. Also a context manager.

    Args:
        model_dir: directory in Hugging Face format.
        log_path: where standard output and error of the process go.
        served_model_name: the model's name in requests; None: the directory.
        host, port: where to listen; port 0 takes a free one.
        max_model_len: longest sequence in tokens; None: the model's limit, at most 2048.
        max_num_seqs: requests decoded at once.
        max_logprobs: most log-probs per token that a request may ask for.
        dtype: ``"float32"`` or ``"bfloat16"``.
        platform: JAX platform of the process, ``"cpu"`` by default, so that it leaves accelerators to the trainer;
            None: JAX chooses.
        environment: further environment variables.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        *,
        log_path: str | os.PathLike[str],
        served_model_name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_logprobs: int = 20,
        dtype: str = "float32",
        platform: str | None = "cpu",
        environment: Mapping[str, str] | None = None,
    ):
        self.log_path = Path(log_path)
        flags: dict[str, object] = {
            "--model": os.fspath(model_dir),
            "--served-model-name": served_model_name,
            "--host": host,
            "--port": port,
            "--max-model-len": max_model_len,
            "--max-num-seqs": max_num_seqs,
            "--max-logprobs": max_logprobs,
            "--dtype": dtype,
        }
        given = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        self._command = [sys.executable, "-m", "ajgrpo.serve", *given, "--exit-on-stdin-eof"]
        self._environment = {**os.environ, **({"JAX_PLATFORMS": platform} if platform else {}), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Starts the process and waits until it accepts connections; returns its address.

        Raises:
            ServerError: it ended instead; holds the last lines of its log.
            ServerTimeoutError: it was not ready in time, and was stopped.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        ready = False
        try:
            address = self._wait_for_address(timeout_s)
            ready = True
            return address
        finally:
            if not ready:
                self.stop()

    @property
    def pid(self) -> int | None:
        """Process id; None when not started or stopped."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def ended(self, within_s: float = 1.0) -> bool:
        """Whether the process is gone, or will be within a moment: its connections break before that."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return not self.alive()

    def stop(self) -> None:
        """Ends the process, gently first. May be called more than once."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        for end in (process.terminate, process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                return
            end()
        process.wait()

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        return "\n".join(lines[-LOG_LINES:]) or "(empty log)"

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _wait_for_address(self, timeout_s: float) -> str:
        assert self._process is not None and self._process.stdout is not None
        deadline, text = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                part = os.read(self._process.stdout.fileno(), 4096)
                if not part:
                    self._process.wait(STOP_TIMEOUT_S)
                    raise ServerError(f"the embedded server ended while starting; {self._log_excerpt()}")
                text += part
                for line in text.decode(errors="replace").splitlines(keepends=True):
                    if line.startswith(READY_PREFIX) and line.endswith("\n"):
                        return line.removeprefix(READY_PREFIX).strip()
        raise ServerTimeoutError(f"the embedded server was not ready within {timeout_s:g} s; {self._log_excerpt()}")

    def _log_excerpt(self) -> str:
        return f"the end of {self.log_path}:\n{self.log_tail()}"

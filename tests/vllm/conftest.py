"""One real vLLM server at a time, started when the first test asks for it and shared by those that follow."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from ajgrpo.inference.client import ControlClient
from tests.vllm import policies
from tests.vllm.server import ROOT, VLLMServer

ENVIRONMENT_VARIABLE = "AJGRPO_VLLM_ENV"
REQUIRE_VARIABLE = "AJGRPO_REQUIRE_VLLM"


@pytest.fixture(scope="session")
def vllm_python() -> pathlib.Path:
    """The interpreter of the server's environment. Without one the tests are skipped, or fail where it is required."""
    environment = pathlib.Path(os.environ.get(ENVIRONMENT_VARIABLE) or ROOT / ".venv-vllm")
    python = environment / "bin" / "python"
    if not python.exists():
        message = f"no vLLM in {environment}: run scripts/setup_vllm_cpu.sh, or set {ENVIRONMENT_VARIABLE}"
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(f"{message} ({REQUIRE_VARIABLE}=1)")
        pytest.skip(message)
    return python


class Servers:
    """Runs one server at a time: asking for another kind ends the last one."""

    def __init__(self, python: pathlib.Path, directory: pathlib.Path):
        self._python, self._directory = python, directory
        self._kind, self._current, self._count = "", None, 0

    def get(self, kind: str, model_dir: pathlib.Path, *arguments: Any, **options: Any) -> VLLMServer:
        """The running server of this kind, started anew where the last one is of another kind or has ended."""
        if self._current is not None and (self._kind != kind or self._current.process.poll() is not None):
            self.stop()
        if self._current is None:
            self._count += 1
            log = self._directory / f"{kind}-{self._count}.log"
            self._current = VLLMServer(self._python, model_dir, log, *arguments, **options).__enter__()
            self._kind = kind
        return self._current

    def stop(self) -> None:
        if self._current is not None:
            current, self._current = self._current, None
            current.stop()


@pytest.fixture(scope="session")
def servers(vllm_python: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(vllm_python, tmp_path_factory.mktemp("vllm"))
    yield running
    running.stop()


@pytest.fixture
def server(servers: Servers) -> VLLMServer:
    """The tiny model that ships with the package; its head is the embedding."""
    return servers.get("tied", policies.TIED.directory)


@pytest.fixture
def control(server: VLLMServer) -> Iterator[ControlClient]:
    client = ControlClient(server.base_url, timeout_s=60)
    yield client
    client.close()

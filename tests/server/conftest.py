"""One engine and one HTTP server for all tests of the server and of the weight transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from ajgrpo.inference.client import ControlClient
from ajgrpo.server.app import build_app
from ajgrpo.server.engine import Engine, EngineOptions
from tests.server import models

OPTIONS = EngineOptions(max_model_len=160, max_num_seqs=4)


@contextlib.contextmanager
def started_engine(options: EngineOptions = OPTIONS) -> Iterator[Engine]:
    engine = Engine(models.CONFIG, models.params(0), options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[Engine]:
    with started_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine with the weights of seed 0, running, without requests."""
    shared_engine.swap_weights(models.params(0), "default").result(30)
    shared_engine.resume().result(30)
    yield shared_engine
    shared_engine.resume().result(30)  # what tests put into the inbox is done now
    assert shared_engine.alive
    assert (shared_engine.stats.running, shared_engine.stats.waiting) == (0, 0), "a test left requests behind"


@pytest.fixture(scope="session")
def base_url(shared_engine: Engine) -> Iterator[str]:
    """The address of an HTTP server around the engine, in a thread of this process."""
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            ready.set()

    server = Server(uvicorn.Config(build_app(shared_engine, "tiny"), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, name="http")
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def control(engine: Engine, base_url: str) -> Iterator[ControlClient]:
    with contextlib.closing(ControlClient(base_url, timeout_s=30)) as client:
        yield client

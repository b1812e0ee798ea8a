"""What the backend refuses before it starts to generate."""

from __future__ import annotations

import types
from typing import Any

import pytest

from ajgrpo import backend, preflight
from ajgrpo.backend import Backend
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerIncompatibleError


class Control:
    """A server that is ready and accepts texts of 64 tokens."""

    def __init__(self, base_url: str, *, timeout_s: float):
        pass

    def wait_until_ready(self, timeout_s: float) -> None:
        pass

    def models(self) -> tuple[str, int]:
        return "tiny", 64

    def close(self) -> None:
        pass


class Transfer:
    """Remembers whether it was prepared."""

    ready = False

    def init(self) -> None:
        self.ready = True

    def destroy(self) -> None:
        pass


def make_backend(length_limit: int | None) -> tuple[Backend, Transfer]:
    parts: Any = types.SimpleNamespace(model_config=types.SimpleNamespace(length_limit=length_limit), tokenizer=None)
    transfer: Any = Transfer()
    return Backend(AsyncGRPOConfig(), parts, transfer=transfer), transfer


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else about the server is as it should be."""
    monkeypatch.setattr(backend, "ControlClient", Control)
    monkeypatch.setattr(preflight, "needs_of", lambda *args: None)
    monkeypatch.setattr(preflight, "inspect", lambda control, needs: [])


def test_a_server_that_goes_beyond_the_rope_scaling_is_refused() -> None:
    started, transfer = make_backend(length_limit=63)
    with pytest.raises(ServerIncompatibleError, match=r"max_model_len=64 tokens.*at most 63.*--max-model-len 63"):
        started.start_server()
    assert not transfer.ready
    started.close()


@pytest.mark.parametrize("length_limit", [64, None])
def test_a_server_within_the_rope_scaling_is_accepted(
    monkeypatch: pytest.MonkeyPatch, length_limit: int | None
) -> None:
    monkeypatch.setattr(backend, "ControlClient", Control)
    started, transfer = make_backend(length_limit)
    started.start_server()
    assert transfer.ready
    assert started.token_budget == 64
    started.close()

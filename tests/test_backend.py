"""What the backend refuses before it starts to generate."""

from __future__ import annotations

import types
from typing import Any

import pytest

from ajgrpo import backend, preflight
from ajgrpo.backend import Backend
from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerIncompatibleError, ServerTimeoutError, ServerUnreachableError


class Control:
    """A server that is ready and accepts texts of 64 tokens."""

    base_url = "http://server"

    def __init__(self, base_url: str, *, timeout_s: float):
        pass

    def wait_until_ready(self, timeout_s: float) -> None:
        pass

    def check_version(self) -> str:
        return "0.32.0"

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
    model = types.SimpleNamespace(length_limit=length_limit, eos_token_ids=())
    parts: Any = types.SimpleNamespace(model_config=model, tokenizer=None)
    transfer: Any = Transfer()
    return Backend(AsyncGRPOConfig(max_completion_length=8), parts, transfer=transfer), transfer


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all checks of the server, only that of the context length is made."""

    def length_only(control: Any, needs: preflight.Needs) -> list[preflight.Finding]:
        inspection = preflight.Inspection(control, needs)
        inspection.server()
        return [preflight.Finding("context length", *inspection.context_length())]

    monkeypatch.setattr(backend, "ControlClient", Control)
    monkeypatch.setattr(preflight, "inspect", length_only)


def test_a_server_that_goes_beyond_the_rope_scaling_is_refused() -> None:
    started, transfer = make_backend(length_limit=63)
    with pytest.raises(ServerIncompatibleError, match=r"max_model_len=64 tokens.*at most 63.*--max-model-len 63"):
        started.start_server()
    assert not transfer.ready
    started.close()


@pytest.mark.parametrize("length_limit", [64, None])
def test_a_server_within_the_rope_scaling_is_accepted(length_limit: int | None) -> None:
    started, transfer = make_backend(length_limit)
    started.start_server()
    assert transfer.ready
    assert started.token_budget == 64
    started.close()


class Silent:
    """A server that answers when its turn in ``answers`` is True."""

    base_url = "http://server"

    def __init__(self, answers: list[bool]):
        self.answers = answers

    def check_health(self, *, timeout_s: float) -> None:
        if not self.answers.pop(0):
            raise ServerUnreachableError("connection refused")


def test_a_silent_server_is_reported_and_an_error_when_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(backend.time, "monotonic", lambda: now[0])
    control: Any = Silent([True, False, True, False, False, False])
    watch = backend.OutageWatch(control, bound_s=2.5 * backend.PROBE_INTERVAL_S)

    def after_one_interval() -> None:
        watch.check()
        watch.check()  # asks no more than once in an interval
        now[0] += backend.PROBE_INTERVAL_S

    for _ in range(5):
        after_one_interval()
    assert [text.startswith("the server at http://server does not answer") for text in caplog.messages] == [True] * 3
    with pytest.raises(ServerTimeoutError, match=r"has not answered for 30 s \(vllm_server_timeout=25\): connection"):
        watch.check()
    assert control.answers == []

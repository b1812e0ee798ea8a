"""Tiny stand-ins: a tokenizer of characters, a server client with answers from a function, and a loop under control."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerIncompatibleError
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse, WeightSpan
from ajgrpo.metrics import Metrics, Observation
from ajgrpo.rollout.api import WorkerSpec
from ajgrpo.rollout.loop import AsyncRolloutLoop
from ajgrpo.types import GroupDone, RolloutSample

EOS = 0
DEADLINE_S = 20.0
"""Nothing in these tests takes a second; a test that waits longer has failed."""


class CharTokenizer:
    """One token per character, its code point, and the special token ``EOS``. A message renders as ``role:text;``."""

    chat_template: str | None = "role:text;"

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **kwargs: Any,
    ) -> list[int]:
        assert tokenize and not return_dict
        text = "".join(f"{message['role']}:{message['content']};" for message in messages)
        return encode(text + kwargs.get("suffix", "") + ("assistant:" if add_generation_prompt else ""))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in token_ids if token != EOS)


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token != EOS)


def reply(text: str, *, version: str = "0", terminated: bool = True, top: int = 3) -> GenerateResponse:
    """Completes with ``text``: token i has log-prob -(i + 1) / 8, and the ``top`` - 1 next code points are likelier."""
    token_ids = encode(text) + ([EOS] if terminated else [])
    log_probs = [-(index + 1) / 8 for index in range(len(token_ids))]
    return GenerateResponse(
        token_ids=token_ids,
        finish_reason="stop" if terminated else "length",
        log_probs=log_probs,
        top_log_probs=[
            {token: log_prob} | {token + other: log_prob + other / 64 for other in range(1, top)}
            for token, log_prob in zip(token_ids, log_probs, strict=True)
        ],
        weight_spans=(WeightSpan(version, 0, len(token_ids)),),
    )


Answer = Callable[[GenerateRequest, int], GenerateResponse]


class FakeClient:
    """Answers each request with ``answer(request, number)``, which may raise; numbers count the requests from 0.

    Attributes:
        requests: all requests so far.
        gates: a request whose number has an event here is answered only after it is set.
    """

    def __init__(self, answer: Answer):
        self.requests: list[GenerateRequest] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.retry_count = 0
        self.closed = False
        self.notify: Callable[[], None] = lambda: None
        self._answer = answer

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        number = len(self.requests)
        self.requests.append(request)
        self.notify()
        if gate := self.gates.get(number):
            await gate.wait()
        return self._answer(request, number)

    async def metrics_text(self) -> str:
        raise ServerIncompatibleError("GET /metrics answered 404")

    async def close(self) -> None:
        self.closed = True


@dataclasses.dataclass
class LocalState:
    """``WorkerState`` without shared memory; ``beats`` counts the heartbeats and ``notify`` is called at each."""

    model_version: int = 0
    token_allowance: int = 0
    taken_tokens: int = 0
    stop_requested: int = 0
    generated_tokens: int = 0
    beats: int = 0
    notify: Callable[[], None] = lambda: None

    @property
    def heartbeat(self) -> float:
        return self._heartbeat

    @heartbeat.setter
    def heartbeat(self, value: float) -> None:
        self._heartbeat = value
        self.beats += 1
        self.notify()


def question(index: int) -> dict[str, Any]:
    """A row of a dataset: ``q0``, ``q1``, … with the answer ``a0``, ``a1``, …"""
    return {"prompt": [{"role": "user", "content": f"q{index}"}], "answer": f"a{index}"}


def make_spec(answer: Answer = lambda request, number: reply(str(number % 2)), **overrides: Any) -> WorkerSpec:
    """A spec with ample allowance and two rollouts per prompt; ``config`` may be a dict of options."""
    options: dict[str, Any] = {
        "num_generations": 2,
        "max_completion_length": 16,
        "num_sampler_logprobs": 2,
        "rollout_retries": 0,
    }
    config = overrides.pop("config", {})
    fields: dict[str, Any] = {
        "config": AsyncGRPOConfig(**options | config) if isinstance(config, dict) else config,
        "base_url": "http://server",
        "model_name": "tiny",
        "max_model_len": 64,
        "tokenizer": CharTokenizer(),
        "dataset": [question(index) for index in range(4)],
        "reward_funcs": [number_reward],
        "eos_token_ids": (EOS,),
        "token_allowance": 10_000,
        "num_epochs": 1.0,
        "client_factory": lambda spec: FakeClient(answer),
    }
    return WorkerSpec(**fields | overrides)


def number_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """The completion's text as a number."""
    return [float(completion[0]["content"]) for completion in completions]


class RunningLoop:
    """A loop inside the test's event loop.

    Attributes:
        published: what went to the rollout queue, in order.
        metrics: everything reported; complete once the loop has ended.
    """

    def __init__(self, spec: WorkerSpec, state: LocalState):
        self.state = state
        self.published: list[RolloutSample | GroupDone] = []
        self.metrics = Metrics()
        self._changed = asyncio.Event()
        state.notify = self._changed.set
        make_client = spec.client_factory
        assert make_client is not None
        client = make_client(spec)
        assert isinstance(client, FakeClient)
        self.client = client
        self.client.notify = self._changed.set
        spec = dataclasses.replace(spec, client_factory=lambda spec: self.client)
        self.loop = (spec.loop_cls or AsyncRolloutLoop)(spec, state=state, publish=self._publish, report=self._report)
        self.task: asyncio.Task[None] | None = None

    @property
    def samples(self) -> list[RolloutSample]:
        return [item for item in self.published if isinstance(item, RolloutSample)]

    @property
    def done(self) -> list[GroupDone]:
        return [item for item in self.published if isinstance(item, GroupDone)]

    async def until(self, ready: Callable[[], bool]) -> None:
        """Waits for something that the loop does; raises the loop's error if it ends first."""
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            while not ready():
                self._changed.clear()
                waiter = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({waiter, self.task}, return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                if self.task.done():
                    self.task.result()
                    assert ready(), "the loop ended first"

    async def settle(self) -> None:
        """Lets the loop look at its state a few times, so that what it may do, it has done."""
        before = self.state.beats
        await self.until(lambda: self.state.beats >= before + 3)

    def _publish(self, item: RolloutSample | GroupDone) -> None:
        self.published.append(item)
        self._changed.set()

    def _report(self, observations: list[Observation]) -> None:
        self.metrics.merge(observations)
        self._changed.set()


@contextlib.asynccontextmanager
async def running(spec: WorkerSpec, model_version: int = 0) -> AsyncIterator[RunningLoop]:
    """Runs the spec's loop in the background; on leaving it is stopped, and its error raised."""
    run = RunningLoop(spec, LocalState(model_version, spec.token_allowance))
    run.task = asyncio.create_task(run.loop.run())
    try:
        yield run
    finally:
        run.state.stop_requested = 1
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({run.task})
    run.task.result()


def run_to_end(spec: WorkerSpec, num_groups: int, model_version: int = 0) -> RunningLoop:
    """Runs until ``num_groups`` groups are done."""

    async def main() -> RunningLoop:
        async with running(spec, model_version) as run:
            await run.until(lambda: len(run.done) >= num_groups)
        return run

    return asyncio.run(main())

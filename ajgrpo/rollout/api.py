"""What the rollout part promises the trainer, and what it needs in return. No behaviour, and nothing but the types.

trainer ── WorkerSpec ──▶ worker process ── RolloutSample, GroupDone ──▶ rollout_queue ──▶ trainer
   └─────── WorkerState (policy version, token allowance, taken tokens, stop) ──▶ loop
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import AjgrpoError
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse


class QueueLike(Protocol):
    """The reading side of ``queue.Queue`` and ``multiprocessing.Queue``; ``get`` raises ``queue.Empty``."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...

    def get_nowait(self) -> Any: ...

    def qsize(self) -> int: ...


@runtime_checkable
class RolloutWorker(Protocol):
    """What a rollout worker offers; implement it to bring another backend."""

    @property
    def rollout_queue(self) -> QueueLike:
        """``RolloutSample`` and ``GroupDone`` records: all samples of a group, then its ``GroupDone``."""
        ...

    @property
    def metrics_queue(self) -> QueueLike:
        """Lists of ``ajgrpo.metrics.Observation``."""
        ...

    def start(self) -> None:
        """Begins to produce rollouts; called once, after the first weight push."""
        ...

    def stop(self) -> None:
        """Stops and releases everything; may be called twice."""
        ...

    def update_model_version(self, version: int) -> None:
        """Tells which policy version the server now runs."""
        ...

    def check_health(self, stale_after_s: float) -> None:
        """Raises WorkerDiedError or WorkerStalledError when no more rollouts can be expected."""
        ...


@runtime_checkable
class PacedRolloutWorker(RolloutWorker, Protocol):
    """A worker that the trainer can hold back: it starts no group past its token allowance.

    Tokens are counted as ``RolloutSample.num_tokens``, on both sides, without regard to shared prefixes.
    """

    def set_token_allowance(self, tokens: int) -> None:
        """Bound on the tokens that may be queued or in flight."""
        ...

    def note_taken(self, tokens: int) -> None:
        """A sample of ``tokens`` tokens has left the rollout queue, trained or not."""
        ...


class GenerateClient(Protocol):
    """The part of ``inference.client.ServerClient`` that the loop uses."""

    retry_count: int

    async def generate(self, request: GenerateRequest) -> GenerateResponse: ...

    async def metrics_text(self) -> str: ...

    async def close(self) -> None: ...


class WorkerState(Protocol):
    """Numbers that the trainer and the loop share. Each has one writer, so none needs a lock.

    Attributes:
        model_version: policy version that the server runs. Written by the trainer.
        token_allowance: bound on the tokens queued or in flight. Written by the trainer.
        taken_tokens: tokens of all samples that have left the rollout queue. Written by the trainer.
        stop_requested: not 0 when the loop must end. Written by the trainer.
        generated_tokens: sampled tokens of all finished rollouts. Written by the loop.
        heartbeat: ``time.monotonic()`` when the event loop last ran. Written by the loop.
    """

    model_version: int
    token_allowance: int
    taken_tokens: int
    stop_requested: int
    generated_tokens: int
    heartbeat: float


@dataclasses.dataclass
class WorkerSpec:
    """All that the worker's process needs to know; every field is pickled.

    Attributes:
        config: the run's configuration.
        base_url: address of the rollout server.
        model_name: the model's name on the server.
        max_model_len: longest sequence that the server accepts, in tokens.
        tokenizer: a ``transformers`` tokenizer with a chat template.
        dataset: rows with a column ``prompt`` (list of messages), which may be missing with ``environment_factory``;
            None: the environment gives every prompt. With ``len`` and ``[]`` it is shuffled anew each
            epoch; otherwise it is read in order, again and again.
        reward_funcs: see ``rollout.scoring``.
        tools: functions offered to ``generate_one``.
        environment_factory: makes an environment, or a mapping of names to factories; see ``rollout.environments``.
        loop_cls: subclass of ``AsyncRolloutLoop``; None: that class itself.
        eos_token_ids: ids that end a completion; sent with each request.
        token_allowance: the allowance until the trainer sets another.
        start_prompt_index: the first prompt to generate, counted over all epochs.
        num_epochs: passes over the dataset after which no new prompt starts; None: no end.
        returns_sampling_mask: the server returns candidate sets by itself (``--return-sampling-mask``). False: they
            are read off the log-probs, of which then ``top_k`` + 1 are requested.
        client_factory: makes the client of the server; None: ``ServerClient``.
    """

    config: AsyncGRPOConfig
    base_url: str
    model_name: str
    max_model_len: int
    tokenizer: Any
    dataset: Any
    reward_funcs: Sequence[Callable[..., Any]]
    tools: Sequence[Callable[..., Any]] = ()
    environment_factory: Any = None
    loop_cls: type[Any] | None = None
    eos_token_ids: tuple[int, ...] = ()
    token_allowance: int = 0
    start_prompt_index: int = 0
    num_epochs: float | None = None
    returns_sampling_mask: bool = False
    client_factory: Callable[[WorkerSpec], GenerateClient] | None = None


class PromptTooLongError(AjgrpoError):
    """A prompt that leaves no room for one sampled token within the server's ``max_model_len``.

    Raised by ``AsyncRolloutLoop.generate_one_turn``. In the first turn it skips the prompt (counted); in a later one it
    ends the conversation.
    """


class RolloutFailedError(AjgrpoError):
    """A rollout that raised or took too long; its group goes on without it."""

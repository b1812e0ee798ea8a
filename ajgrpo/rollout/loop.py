"""The rollout loop: prompts in, scored samples out, never further ahead of the trainer than allowed.

    dataset ──▶ dispatch ──▶ rollout tasks (G per group) ──▶ score queue ──▶ score ──▶ samples, then GroupDone
                   ▲                │ last of a group                          │
                   │ wake           └──────── failed, too long ────────────────┴──▶ GroupDone without samples
                control: heartbeat; looks for a new version, allowance, taken tokens, stop
                report: hands the metrics over once a second

| task     | consumes                 | waits for                                             | produces             |
|----------|--------------------------|-------------------------------------------------------|----------------------|
| dispatch | prompts                  | token allowance (``TokenPacer``), a free slot          | rollout tasks        |
| rollout  | one prompt               | the server; room in the score queue (a group's last)   | a collected group    |
| score    | collected groups, in order | the reward functions                                | samples, GroupDone   |
| control  | ``WorkerState``          | ``POLL_S``                                            | heartbeat, wake, stop |
| report   | metrics                  | ``REPORT_S``                                          | observations         |

Any task that raises ends the loop with its error. After the last prompt the loop idles until it is stopped.

Left out: tools and environments in the default ``generate_one``, and a concurrency cap that follows ``/metrics``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np

from ajgrpo.errors import ConfigError, RolloutWorkerError, ServerError, ServerIncompatibleError
from ajgrpo.inference.client import ServerClient
from ajgrpo.inference.protocol import GenerateRequest
from ajgrpo.metrics import Metrics, Observation
from ajgrpo.rollout.api import GenerateClient, PromptTooLongError, WorkerSpec, WorkerState
from ajgrpo.rollout.chat import ChatFormat
from ajgrpo.rollout.concurrency import RolloutSlots, TokenPacer
from ajgrpo.rollout.episode import CURRENT_ROLLOUT, RolloutContext, read_turn, run_episode, sampling_params
from ajgrpo.rollout.group import CollectedGroup, OpenGroup, add_rollout_metrics, collect, num_generated
from ajgrpo.rollout.prompts import EpochGuard, Prompt, read_prompts
from ajgrpo.rollout.scoring import (
    Scorer,
    add_reward_metrics,
    checked_advantages,
    has_signal,
    standardized_advantages,
    total_rewards,
)
from ajgrpo.types import GroupDone, Message, Rollout, RolloutGroup, RolloutSample, TurnRecord

POLL_S = 0.02
"""How often the loop looks at what the trainer has written into ``WorkerState``."""

REPORT_S = 1.0
"""How often metrics are handed over."""

SCORE_QUEUE_SIZE = 16
"""Groups that may wait for their rewards before generation has to wait."""

MAX_CONSECUTIVE_FAILURES = 32
"""Failed rollouts without a success in between after which the server counts as lost. The client has retried each."""

log = logging.getLogger(__name__)


class _StopRequested(Exception):
    """Ends the loop's tasks."""


class AsyncRolloutLoop:
    """Generates and scores rollouts. Subclass it to change a step; the methods without underscore are the hooks.

    The instance is made in the worker's process, so a subclass must stand at the top level of a module. Clients and
    other resources belong into ``setup``, not into ``__init__``.

    Args:
        spec: what to do.
        state: numbers shared with the trainer.
        publish: takes ``RolloutSample`` and ``GroupDone`` records; must not block.
        report: takes lists of observations; must not block.

    Attributes:
        config: the run's configuration (a subclass of ``AsyncGRPOConfig`` may carry options of its own).
        tokenizer: the tokenizer.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        state: WorkerState,
        publish: Callable[[RolloutSample | GroupDone], None],
        report: Callable[[list[Observation]], None],
    ):
        if spec.environment_factory is not None:
            raise ConfigError("environment_factory is not available yet; score rollouts with reward_funcs")
        self.config, self.tokenizer = spec.config, spec.tokenizer
        self._spec, self._state, self._publish, self._report_to = spec, state, publish, report
        self._chat = ChatFormat(spec.tokenizer, spec.config.chat_template_kwargs)
        self._scorer = Scorer(spec.reward_funcs)
        self._metrics = Metrics()
        self._pacer = TokenPacer()
        self._slots = RolloutSlots(spec.config.max_concurrent_rollouts)
        self._guard = EpochGuard(len(spec.dataset) if isinstance(spec.dataset, Sized) else None)
        self._failures_in_a_row = 0
        self._reported = _Reported(time.monotonic())

    # Hooks

    async def setup(self) -> None:
        """Creates what the other hooks need. Runs on the loop's event loop, before the first prompt."""

    async def close(self) -> None:
        """Releases what ``setup`` created. Runs when the loop ends, also by an error."""

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether to generate for a prompt. A rejected one is skipped, and counts towards the epoch.

        Args:
            row_index: row of the dataset.
            row: its columns.
            epoch: full passes over the dataset before this one.
        """
        return True

    async def generate_one(
        self, prompt: list[Message], tools: Sequence[Callable[..., Any]], group_id: int = 0
    ) -> Rollout:
        """Generates one rollout: renders the prompt and samples the answer.

        An override returns every request in ``Rollout.turns``, since training sequences are made of them, and may set
        ``Rollout.reward``. A ``ServerError`` that it raises drops this one rollout; any other exception ends the run.

        Args:
            prompt: the prompt's messages; the override may keep and change them.
            tools: the functions that the rollout may call.
            group_id: the group that the rollout belongs to.
        """
        if tools:
            raise ConfigError("tools are not available yet in the default generate_one; override it to call them")
        return await run_episode(prompt, self._chat, self.generate_one_turn)

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Samples one answer with the configuration's sampling settings.

        Args:
            prompt_ids: token ids of the whole prompt.

        Raises:
            PromptTooLongError: the server's context has no room for one more token.
            ServerError: the request failed, the client's retries included.
        """
        room = self._spec.max_model_len - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room within max_model_len={self._spec.max_model_len}"
            )
        params = sampling_params(
            self.config,
            room=room,
            seed=CURRENT_ROLLOUT.get().next_seed(self.config.seed),
            eos_token_ids=self._spec.eos_token_ids,
            returns_sampling_mask=self._spec.returns_sampling_mask,
        )
        response = await self._client.generate(GenerateRequest(self._spec.model_name, prompt_ids, params))
        return read_turn(prompt_ids, response, self.config)

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """One advantage per rollout from ``group.rewards``: standardized in the group, 0 where the reward is NaN.

        Called for every scored group, also for those dropped afterwards because their rewards are all equal.
        """
        assert group.rewards is not None
        return standardized_advantages(group.rewards)

    # Running

    async def run(self) -> None:
        """Runs until ``state.stop_requested``.

        Raises:
            RewardError: a reward function or ``compute_advantages`` failed.
            DatasetError: a row is unusable, or a whole epoch yields nothing.
            ServerIncompatibleError, RolloutWorkerError: the server cannot be used, or was lost.
        """
        self._wake = asyncio.Event()
        self._score_queue: asyncio.Queue[CollectedGroup] = asyncio.Queue(SCORE_QUEUE_SIZE)
        make_client = self._spec.client_factory or _server_client
        self._client: GenerateClient = make_client(self._spec)
        try:
            await self.setup()
            try:
                await self._run_tasks()
            finally:
                await self.close()
        finally:
            self._scorer.close()
            await self._client.close()
            self._hand_over_metrics()

    async def _run_tasks(self) -> None:
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._control, self._dispatch, self._score, self._report):
                    self._tasks.create_task(work(), name=work.__name__.strip("_"))
        except BaseExceptionGroup as group:
            failure = next((error for error in group.exceptions if not isinstance(error, _StopRequested)), None)
        if failure is not None:  # raised here, outside the handler, to keep its traceback free of the group's
            raise failure

    async def _control(self) -> None:
        while not self._state.stop_requested:
            self._state.heartbeat = time.monotonic()
            self._wake.set()
            await asyncio.sleep(POLL_S)
        raise _StopRequested

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._hand_over_metrics()

    def _hand_over_metrics(self) -> None:
        now, tokens, retries = time.monotonic(), self._state.generated_tokens, self._client.retry_count
        last, self._reported = self._reported, _Reported(now, tokens, retries)
        self._metrics.add_rate("rollout/generated_tokens_per_s", tokens - last.tokens, now - last.time)
        self._metrics.add("rollout/vllm_retry_count", retries - last.retries)
        self._metrics.add("rollout/concurrency", self._slots.in_flight)
        self._metrics.add("rollout/concurrency_cap", self._slots.cap)
        self._metrics.add("rollout/score_queue_size", self._score_queue.qsize())
        self._report_to(self._metrics.drain())

    # Generating

    async def _dispatch(self) -> None:
        spec, group_id = self._spec, 0
        prompts = read_prompts(
            spec.dataset, seed=self.config.seed, start_index=spec.start_prompt_index, num_epochs=spec.num_epochs
        )
        # A streaming dataset may wait for its source, so rows are read in a thread.
        while (prompt := await asyncio.to_thread(next, prompts, None)) is not None:
            self._guard.open(prompt)
            await self._wait_for_allowance()
            if self.filter_prompt(prompt.row_index, prompt.row, prompt.epoch):
                await self._start_group(OpenGroup(prompt, group_id, self.config.num_generations))
                group_id += 1
            else:
                self._skip(prompt, "rejected by filter_prompt")

    async def _wait_for_allowance(self) -> None:
        started, paced = time.monotonic(), self._pacer.expected_group_tokens is not None
        if (
            await self._wait_until(lambda: self._pacer.may_start(self._state.token_allowance, self._state.taken_tokens))
            and paced
        ):
            self._metrics.add("rollout/backpressure_s", time.monotonic() - started)

    async def _wait_until(self, ready: Callable[[], bool]) -> bool:
        """Waits until ``ready()``; True when it had to wait. Only the dispatch task may wait here."""
        waited = False
        while not ready():
            waited = True
            self._wake.clear()
            await self._wake.wait()
        return waited

    async def _start_group(self, group: OpenGroup) -> None:
        self._pacer.start_group()
        for index in range(self.config.num_generations):
            await self._wait_until(lambda: self._slots.available)
            if index == 0:
                group.model_version = self._state.model_version
            self._slots.acquire()
            self._tasks.create_task(self._run_rollout(group, index), name=f"rollout {group.prompt.index}.{index}")

    async def _run_rollout(self, group: OpenGroup, index: int) -> None:
        CURRENT_ROLLOUT.set(RolloutContext(group.prompt.index, index))
        started = time.monotonic()
        outcome: Rollout | PromptTooLongError | ServerError
        try:
            outcome = await self.generate_one(group.prompt.messages, self._spec.tools, group_id=group.group_id)
            if not isinstance(outcome, Rollout):
                raise TypeError(f"generate_one must return a Rollout, got {outcome!r:.200}")
            outcome.duration_s = time.monotonic() - started
            self._state.generated_tokens += num_generated(outcome)
            self._failures_in_a_row = 0
        except PromptTooLongError as exc:
            outcome = exc
        except ServerIncompatibleError:
            raise
        except ServerError as exc:
            outcome = exc
            self._note_failure(group, index, exc)
        finally:
            self._slots.release()
            self._wake.set()
        if group.settle(index, outcome):
            await self._finish_group(group)

    def _note_failure(self, group: OpenGroup, index: int, error: ServerError) -> None:
        self._metrics.add("rollout/failed_count", 1)
        self._failures_in_a_row += 1
        log.warning("rollout %d of prompt %d failed: %s", index, group.prompt.index, error)
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise RolloutWorkerError(
                f"{self._failures_in_a_row} rollouts failed in a row; is the server at {self._spec.base_url} still "
                f"running? The last error: {error}"
            ) from error

    async def _finish_group(self, group: OpenGroup) -> None:
        """Passes a group on to the scorer, or gives it up when too little is left of it to compare."""
        errors = group.errors
        if len(group.rollouts) < 2 and errors:
            self._pacer.abandon_group()
            if all(isinstance(error, PromptTooLongError) for error in errors) and not group.rollouts:
                self._metrics.add("rollout/prompt_too_long_count", 1)
                self._skip(group.prompt, "too long for the server's max_model_len")
            else:
                self._metrics.add("rollout/failed_group_count", 1)
                self._announce(GroupDone(group.prompt.index, 0))
            return
        collected = collect(group)
        add_rollout_metrics(self._metrics, collected, self._spec.eos_token_ids)
        with self._metrics.timer("rollout/score_block_s"):
            await self._score_queue.put(collected)

    def _skip(self, prompt: Prompt, reason: str) -> None:
        self._announce(GroupDone(prompt.index, 0))
        self._guard.skip(prompt, reason)

    # Scoring

    async def _score(self) -> None:
        while True:
            collected = await self._score_queue.get()
            group = collected.group
            self._metrics.add("rollout/score_wait_s", time.monotonic() - group.queued_at)
            with self._metrics.timer("rollout/score_s"):
                sources = await self._scorer.score(group)
            group.rewards = total_rewards(sources, len(collected.rollouts))
            advantages = checked_advantages(self.compute_advantages(group), len(collected.rollouts))
            kept = has_signal(group.rewards)
            add_reward_metrics(self._metrics, sources, group.rewards, kept=kept)
            self._publish_group(collected, advantages, kept)

    def _publish_group(self, collected: CollectedGroup, advantages: np.ndarray, kept: bool) -> None:
        samples = collected.samples(advantages, self.config.num_sampler_logprobs) if kept else []
        # The pacer hears of the samples before the trainer can take them, so that held tokens never fall below 0.
        self._pacer.finish_group(collected.num_tokens, sum(sample.num_tokens for sample in samples))
        for sample in samples:
            self._publish(sample)
        self._announce(GroupDone(collected.prompt.index, len(samples)))
        self._wake.set()

    def _announce(self, done: GroupDone) -> None:
        """Ends a group. Its metrics go first, so that the last window of a run holds those of its last group."""
        self._report_to(self._metrics.drain())
        self._publish(done)


class _Reported:
    """The running totals when metrics were last handed over."""

    def __init__(self, time: float, tokens: int = 0, retries: int = 0):
        self.time, self.tokens, self.retries = time, tokens, retries


def _server_client(spec: WorkerSpec) -> GenerateClient:
    return ServerClient(spec.base_url, timeout_s=spec.config.vllm_server_timeout)

"""The rollout loop: prompts in, scored samples out, never further ahead of the trainer than allowed.

    dataset ──▶ dispatch ──▶ rollout tasks (G per group) ──▶ score queue ──▶ score ──▶ samples, then GroupDone
                   ▲                │ last of a group                          │
                   │ wake           └──────── failed, too long ────────────────┴──▶ GroupDone without samples
                control: heartbeat; looks for a new version, allowance, taken tokens, stop
                report: hands the metrics over once a second

| task     | consumes                   | waits for                                            | produces              |
|----------|----------------------------|------------------------------------------------------|-----------------------|
| dispatch | prompts                    | token allowance (``TokenPacer``), a free slot        | rollout tasks         |
| rollout  | one prompt                 | server, tools; room in the score queue (last one)    | a collected group     |
| score    | collected groups, in order | the reward functions                                 | samples, GroupDone    |
| control  | ``WorkerState``            | ``POLL_S``                                           | heartbeat, wake, stop |
| report   | metrics                    | ``REPORT_S``                                         | observations          |
| load     | the server's ``/metrics``  | ``LOAD_POLL_S``                                      | the cap of the slots  |
| watch    | what came out              | ``WATCH_S``                                          | a line in the log     |

A rollout that fails or takes too long is tried again, then given up; its group is scored with the others. The loop ends
with an error only when everything fails, or when a hook or the configuration cannot work at all. After the last prompt
the loop idles until it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from typing import Any

import numpy as np

from ajgrpo.errors import (
    AjgrpoError,
    ConfigError,
    DatasetError,
    RewardError,
    RolloutWorkerError,
    ServerError,
    ServerIncompatibleError,
)
from ajgrpo.inference.client import ServerClient, parse_metrics
from ajgrpo.inference.protocol import GenerateRequest
from ajgrpo.metrics import Metrics, Observation
from ajgrpo.rollout.api import GenerateClient, PromptTooLongError, RolloutFailedError, WorkerSpec, WorkerState
from ajgrpo.rollout.chat import ChatFormat
from ajgrpo.rollout.concurrency import LoadCap, RolloutSlots, ServerLoad, TokenPacer
from ajgrpo.rollout.environments import EnvironmentPool, EnvironmentRollout
from ajgrpo.rollout.episode import CURRENT_ROLLOUT, RolloutContext, read_turn, run_episode, sampling_params
from ajgrpo.rollout.group import CollectedGroup, Generated, OpenGroup, add_rollout_metrics, collect, num_generated
from ajgrpo.rollout.prompts import EpochGuard, Prompt, read_prompts
from ajgrpo.rollout.scoring import (
    RewardRaisedError,
    Scorer,
    add_reward_metrics,
    checked_advantages,
    has_signal,
    standardized_advantages,
    total_rewards,
)
from ajgrpo.rollout.templates import choose_format
from ajgrpo.rollout.threads import UserThreads
from ajgrpo.rollout.tools import ToolFunction, ToolSession, describe_tools
from ajgrpo.types import GroupDone, Message, Rollout, RolloutGroup, RolloutSample, TurnRecord

POLL_S = 0.02
"""How often the loop looks at what the trainer has written into ``WorkerState``."""

REPORT_S = 1.0
"""How often metrics are handed over."""

SCORE_QUEUE_SIZE = 16
"""Groups that may wait for their rewards before generation has to wait."""

MAX_CONSECUTIVE_FAILURES = 32
"""Failed rollouts without a success in between after which the run ends. Each has been tried again."""

MAX_REWARD_FAILURES = 8
"""Groups in a row whose reward functions raised after which the run ends (fewer when the dataset is smaller)."""

LOAD_POLL_S = 5.0
"""How often the server's load is looked at."""

LOAD_TIMEOUT_S = 10.0
"""Bound on one look; a server that is paused or busy answers the next one."""

WATCH_S = 60.0
"""How long no sample may come out before the log says why."""

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
        self.config, self.tokenizer = spec.config, spec.tokenizer
        self._spec, self._state, self._publish, self._report_to = spec, state, publish, report
        self._scorer = Scorer(spec.reward_funcs)
        self._metrics = Metrics()
        self._pacer = TokenPacer()
        self._slots = RolloutSlots(spec.config.max_concurrent_rollouts)
        self._guard = EpochGuard(len(spec.dataset) if isinstance(spec.dataset, Sized) else None)
        self._failures_in_a_row = self._reward_failures_in_a_row = 0
        self._finished_rollouts = 0
        self._num_prompts = math.inf
        if isinstance(spec.dataset, Sized) and spec.num_epochs is not None:
            self._num_prompts = max(spec.num_epochs * len(spec.dataset), 1)
        self._preemptions: float | None = None
        self._fruitless: Counter[str] = Counter()
        self._reported = _Reported(time.monotonic())

    @functools.cached_property
    def _chat(self) -> ChatFormat:
        """Chosen when it is first needed: a ``generate_one`` of one's own may render by itself."""
        with_tools = bool(self._spec.tools) or self._spec.environment_factory is not None
        return choose_format(self.tokenizer, self.config.chat_template_kwargs, with_tools=with_tools)

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
        """Generates one rollout: samples turns and runs the tools that they call, until a turn calls none.

        An override returns every request in ``Rollout.turns``, since training sequences are made of them, and may set
        ``Rollout.reward``. What it raises fails this one rollout, which is tried again.

        Args:
            prompt: the prompt's messages; the override may keep and change them.
            tools: the functions that the rollout may call.
            group_id: the group that the rollout belongs to.
        """
        if not tools:
            return (await run_episode(prompt, self._chat, self.generate_one_turn)).rollout
        described = describe_tools(tools)
        session = ToolSession(described, self._threads, self._metrics)
        episode = await run_episode(
            prompt,
            self._chat,
            self.generate_one_turn,
            session.respond,
            tools=[tool.schema for tool in described],
            max_responses=self.config.max_tool_calling_iterations,
        )
        self._metrics.add("tools/loop_exhausted_frac", episode.exhausted)
        episode.rollout.tool_call_count = session.call_count
        episode.rollout.tool_failure_count = session.failure_count
        return episode.rollout

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
            RewardError: a reward function returned something unusable, or raised for group after group, or
                ``compute_advantages`` failed.
            DatasetError: a row is unusable, or a whole epoch yields nothing.
            ServerIncompatibleError, RolloutWorkerError: the server cannot be used, or was lost.
        """
        self._wake = asyncio.Event()
        self._score_queue: asyncio.Queue[CollectedGroup] = asyncio.Queue(SCORE_QUEUE_SIZE)
        make_client = self._spec.client_factory or _server_client
        self._client: GenerateClient = make_client(self._spec)
        self._threads = UserThreads(self.config.max_concurrent_rollouts, "rollout-user-code")
        factory = self._spec.environment_factory
        self._environments = None if factory is None else EnvironmentPool(factory, self._threads, self._metrics)
        self._load_cap = LoadCap(self.config.max_concurrent_rollouts, self._spec.max_model_len)
        try:
            if type(self).generate_one is AsyncRolloutLoop.generate_one:
                _ = self._chat  # what is wrong with the template is told now, not with the first rollout
            await self.setup()
            try:
                await self._run_tasks()
            finally:
                await self.close()
        finally:
            self._threads.close()
            self._scorer.close()
            await self._client.close()
            self._hand_over_metrics()

    async def _run_tasks(self) -> None:
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._control, self._load, self._dispatch, self._score, self._report, self._watch):
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

    async def _load(self) -> None:
        """Sets the cap on rollouts in flight by the server's load, as long as the server tells it."""
        while await self._look_at_load():
            await asyncio.sleep(LOAD_POLL_S)

    async def _look_at_load(self) -> bool:
        """One look; False when the server has no ``/metrics``."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                text = await self._client.metrics_text()
        except ServerIncompatibleError:
            return False
        except (ServerError, TimeoutError) as exc:
            log.debug("no look at the server's load: %s", exc)
            return True
        if (load := ServerLoad.read(parse_metrics(text))) is None:
            return False
        self._slots.cap = self._load_cap.update(load, self._finished_rollouts)
        self._wake.set()
        self._metrics.add("rollout/vllm_kv_cache_usage_frac", load.cache_usage)
        self._metrics.add("rollout/vllm_running_requests", load.running)
        self._metrics.add("rollout/vllm_queued_requests", load.waiting)
        if self._preemptions is not None:
            self._metrics.add("rollout/vllm_preemption_count", max(load.preemptions - self._preemptions, 0.0))
        self._preemptions = load.preemptions
        return True

    async def _watch(self) -> None:
        """Says in the log why no sample comes out."""
        published = -1
        while True:
            published, before = self._pacer.published_samples, published
            if published == before:
                log.warning("no sample for %.0f s: %s", WATCH_S, self._why_nothing_comes())
            await asyncio.sleep(WATCH_S)

    def _why_nothing_comes(self) -> str:
        state = self._state
        if self._fruitless:
            return "; ".join(f"{count} groups {reason}" for reason, count in self._fruitless.items())
        if not self._slots.in_flight and not self._score_queue.empty():
            return f"{self._score_queue.qsize()} groups wait for their rewards"
        if not self._slots.in_flight and not self._pacer.may_start(state.token_allowance, state.taken_tokens):
            held = self._pacer.held(state.taken_tokens)
            return f"the trainer takes none of the {held:.0f} tokens in its queue (allowance {state.token_allowance})"
        if self._slots.in_flight:
            retried = f"; {self._client.retry_count} requests were retried" if self._client.retry_count else ""
            return f"{self._slots.in_flight} rollouts are in flight and none finishes{retried}"
        return "no prompt is left, or the dataset gives none"

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
            spec.dataset,
            seed=self.config.seed,
            start_index=spec.start_prompt_index,
            num_epochs=spec.num_epochs,
            from_environment=spec.environment_factory is not None,
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
            name = f"rollout {group.prompt.index}.{index}"
            group.tasks[index] = self._tasks.create_task(self._run_rollout(group, index), name=name)

    async def _run_rollout(self, group: OpenGroup, index: int) -> None:
        CURRENT_ROLLOUT.set(RolloutContext(group.prompt.index, index))
        try:
            outcome = await self._attempt(group, index)
        except asyncio.CancelledError:
            if not group.given_up:
                raise
            outcome = RolloutFailedError(f"the rest of its group waited longer than {self.config.straggler_timeout} s")
            self._metrics.add("rollout/straggler_count", 1)
        finally:
            self._slots.release()
            self._wake.set()
        if group.settle(index, outcome):
            await self._finish_group(group)
        elif self.config.straggler_timeout is not None and group.waits_for_stragglers:
            asyncio.get_running_loop().call_later(self.config.straggler_timeout, group.give_up)

    async def _attempt(self, group: OpenGroup, index: int) -> Generated | AjgrpoError:
        """One rollout, tried again as often as ``rollout_retries`` allows."""
        error: AjgrpoError | None = None
        for attempt in range(self.config.rollout_retries + 1):
            if attempt:
                self._metrics.add("rollout/retry_count", 1)
            try:
                async with asyncio.timeout(self.config.rollout_timeout) as limit:
                    outcome = await self._generate(group)
            except PromptTooLongError as exc:
                return exc
            # What no repetition would change.
            except (ServerIncompatibleError, ConfigError, DatasetError, RewardError, RolloutWorkerError):
                raise
            except TimeoutError as exc:
                what = f"took longer than rollout_timeout={self.config.rollout_timeout:g} s"
                error = _failed(what, exc) if limit.expired() else _failed(f"raised {exc!r}", exc)
            except ServerError as exc:
                error = exc
            except Exception as exc:  # user code of one rollout must not end the others; it is logged and counted
                error = _failed(f"raised {type(exc).__name__}: {exc}", exc)
                log.info("rollout %d of prompt %d", index, group.prompt.index, exc_info=exc)
            else:
                self._failures_in_a_row = 0
                self._finished_rollouts += 1
                self._state.generated_tokens += num_generated(outcome.rollout)
                return outcome
        assert error is not None
        self._note_failure(group, index, error)
        return error

    async def _generate(self, group: OpenGroup) -> Generated:
        started = time.monotonic()
        async with self._environment(group) as environment:
            prompt = group.prompt.messages if environment is None else environment.prompt
            offered: list[ToolFunction] = [*self._spec.tools, *([] if environment is None else environment.tools)]
            rollout = await self.generate_one([dict(message) for message in prompt], offered, group_id=group.group_id)
            if not isinstance(rollout, Rollout):
                raise RolloutWorkerError(f"generate_one must return a Rollout, got {rollout!r:.200}")
            reward = None if environment is None else await environment.reward()
        rollout.duration_s = time.monotonic() - started
        return Generated(rollout, prompt, reward)

    @contextlib.asynccontextmanager
    async def _environment(self, group: OpenGroup) -> AsyncIterator[EnvironmentRollout | None]:
        if self._environments is None:
            yield None
            return
        messages = group.prompt.messages
        async with self._environments.rollout(group.prompt.row, messages) as environment:
            yield environment

    def _note_failure(self, group: OpenGroup, index: int, error: AjgrpoError) -> None:
        self._metrics.add("rollout/failed_count", 1)
        self._failures_in_a_row += 1
        log.warning("rollout %d of prompt %d failed: %s", index, group.prompt.index, error)
        if self._failures_in_a_row >= min(MAX_CONSECUTIVE_FAILURES, self._num_prompts * self.config.num_generations):
            raise RolloutWorkerError(
                f"{self._failures_in_a_row} rollouts failed in a row; is the server at {self._spec.base_url} still "
                f"running? The last error: {error}"
            ) from error

    async def _finish_group(self, group: OpenGroup) -> None:
        """Passes a group on to the scorer, or gives it up when too little is left of it to compare."""
        errors = group.errors
        if len(group.generated) < 2 and errors:
            self._pacer.abandon_group()
            if all(isinstance(error, PromptTooLongError) for error in errors) and not group.generated:
                self._metrics.add("rollout/prompt_too_long_count", 1)
                self._skip(group.prompt, "too long for the server's max_model_len")
            else:
                self._metrics.add("rollout/failed_group_count", 1)
                self._fruitless["with failed rollouts"] += 1
                self._announce(GroupDone(group.prompt.index, 0))
            return
        collected = collect(group)
        add_rollout_metrics(self._metrics, collected, self._spec.eos_token_ids)
        if self._spec.tools or self._environments is not None:
            calls = sum(rollout.tool_call_count for rollout in collected.rollouts)
            self._metrics.add_rate("tools/call_frequency", calls, len(collected.rollouts))
            failures = sum(rollout.tool_failure_count for rollout in collected.rollouts)
            self._metrics.add_rate("tools/failure_frequency", failures, calls)
        with self._metrics.timer("rollout/score_block_s"):
            await self._score_queue.put(collected)

    def _skip(self, prompt: Prompt, reason: str) -> None:
        self._fruitless[reason] += 1
        self._announce(GroupDone(prompt.index, 0))
        self._guard.skip(prompt, reason)

    # Scoring

    async def _score(self) -> None:
        while True:
            collected = await self._score_queue.get()
            group = collected.group
            self._metrics.add("rollout/score_wait_s", time.monotonic() - group.queued_at)
            with self._metrics.timer("rollout/score_s"):
                try:
                    sources = await self._scorer.score(group)
                except RewardRaisedError as exc:
                    self._note_reward_failure(collected, exc)
                    continue
            self._reward_failures_in_a_row = 0
            group.rewards = total_rewards(sources, len(collected.rollouts))
            advantages = checked_advantages(self.compute_advantages(group), len(collected.rollouts))
            kept = has_signal(group.rewards)
            add_reward_metrics(self._metrics, sources, group.rewards, kept=kept)
            self._publish_group(collected, advantages, kept)

    def _note_reward_failure(self, collected: CollectedGroup, error: RewardRaisedError) -> None:
        """Drops the group; ends the run when nothing else has come for a while."""
        self._metrics.add("rollout/failed_group_count", 1)
        self._reward_failures_in_a_row += 1
        log.warning("prompt %d is dropped: %s", collected.prompt.index, error)
        if self._reward_failures_in_a_row >= min(MAX_REWARD_FAILURES, self._num_prompts):
            raise error
        self._pacer.finish_group(collected.num_tokens, 0, 0)
        self._fruitless["whose reward functions raised"] += 1
        self._publish(GroupDone(collected.prompt.index, 0))
        self._wake.set()

    def _publish_group(self, collected: CollectedGroup, advantages: np.ndarray, kept: bool) -> None:
        samples = collected.samples(advantages, self.config.num_sampler_logprobs) if kept else []
        # The pacer hears of the samples before the trainer can take them, so that held tokens never fall below 0.
        self._pacer.finish_group(collected.num_tokens, sum(sample.num_tokens for sample in samples), len(samples))
        if samples:
            self._fruitless.clear()
        else:
            self._fruitless["with equal rewards, or fewer than two scored"] += 1
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


def _failed(what: str, cause: BaseException) -> RolloutFailedError:
    error = RolloutFailedError(f"the rollout {what}")
    error.__cause__ = cause
    return error


def _server_client(spec: WorkerSpec) -> GenerateClient:
    return ServerClient(spec.base_url, timeout_s=spec.config.vllm_server_timeout)

"""The loop's order of events, with a fake server client and no process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import (
    DatasetError,
    RewardError,
    RolloutWorkerError,
    ServerIncompatibleError,
    ServerResponseError,
)
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse
from ajgrpo.rollout.loop import MAX_CONSECUTIVE_FAILURES, AsyncRolloutLoop
from ajgrpo.types import GroupDone, Message, Rollout, RolloutGroup, RolloutSample, TurnRecord
from tests.rollout.fakes import (
    EOS,
    RunningLoop,
    encode,
    make_spec,
    question,
    reply,
    run_to_end,
    running,
    text_of,
)

PROMPT = "user:q{};assistant:"


def row_of(request: GenerateRequest) -> int:
    """The dataset row that a request belongs to."""
    return int(text_of(request.token_ids).removeprefix("user:q").removesuffix(";assistant:"))


def test_samples_of_a_group_come_before_its_end() -> None:
    run = run_to_end(make_spec(), 4)
    order = [(item.prompt_index, type(item)) for item in run.published]
    kinds = [RolloutSample, RolloutSample, GroupDone]
    assert order == [(done.prompt_index, kind) for done in run.done for kind in kinds]
    assert sorted(done.prompt_index for done in run.done) == [0, 1, 2, 3]
    assert all(done.num_samples == 2 for done in run.done)


def test_a_sample_holds_prompt_answer_advantage_and_stamps() -> None:
    run = run_to_end(make_spec(lambda request, number: reply(str(number % 2), version="6")), 4, model_version=6)
    first, second = run.samples[:2]
    row = int(np.random.default_rng([42, 0]).permutation(4)[0])
    assert first.input_ids.tolist() == [*encode(PROMPT.format(row)), ord("0"), EOS]
    assert first.trained_positions.tolist() == [18, 19]
    assert first.old_log_probs.tolist() == [-1 / 8, -2 / 8]
    assert first.sampler_ids.tolist() == [[50, 49], [2, 1]]
    assert first.versions.tolist() == [6, 6] and first.model_version == 6
    assert (first.group_id, first.row_index, first.prompt_index) == (0, row, 0)
    assert first.candidate_ids is None
    assert [first.advantage, second.advantage] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert first.rollout_id != second.rollout_id and first.queued_at > 0
    assert [sample.prompt_index for sample in run.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert run.state.generated_tokens == 16


def test_requests_follow_the_configuration() -> None:
    run = run_to_end(make_spec(max_model_len=24), 4)
    assert len(run.client.requests) == 8
    assert len({request.sampling_params.seed for request in run.client.requests}) == 8
    request = run.client.requests[0]
    assert request.model == "tiny"
    assert request.sampling_params.max_tokens == 24 - len(PROMPT.format(0))
    assert request.sampling_params.logprobs == 3 and request.sampling_params.stop_token_ids == (EOS,)


def test_two_runs_send_the_same_requests() -> None:
    """One group in flight at a time, so that the order is not left to the scheduler."""
    spec = make_spec(config={"max_concurrent_rollouts": 1})
    assert run_to_end(spec, 4).client.requests == run_to_end(spec, 4).client.requests


def test_a_resumed_run_starts_at_its_prompt() -> None:
    spec = make_spec(num_epochs=2.0, start_prompt_index=6)
    run = run_to_end(spec, 2)
    assert sorted(done.prompt_index for done in run.done) == [6, 7]
    assert [s.row_index for s in run.samples[::2]] == np.random.default_rng([42, 1]).permutation(4)[2:].tolist()


def test_after_the_last_prompt_the_loop_idles_until_stopped() -> None:
    async def main() -> None:
        async with running(make_spec()) as run:
            await run.until(lambda: len(run.done) == 4)
            await run.settle()
            assert run.task is not None and not run.task.done()
            assert len(run.done) == 4 and run.client.closed is False
        assert run.client.closed

    asyncio.run(main())


# Rewards and what is dropped


def test_a_group_with_equal_rewards_is_dropped_and_counted() -> None:
    """Prompt 0's rollouts answer alike."""
    run = run_to_end(make_spec(lambda request, number: reply("1" if number < 2 else str(number % 2))), 4)
    assert run.done[0] == GroupDone(prompt_index=0, num_samples=0)
    assert {sample.prompt_index for sample in run.samples} == {1, 2, 3}
    metrics = run.metrics.reduce()
    assert metrics["frac_reward_zero_std"] == 1 / 4
    assert metrics["reward"] == (2 + 3) / 8 and metrics["reward_kept"] == 0.5 and metrics["reward_dropped"] == 1.0
    assert metrics["completions/duplicate_frac"] == 1 / 8


def unscored(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None for _ in completions]


def test_a_group_that_nobody_scores_is_dropped() -> None:
    run = run_to_end(make_spec(reward_funcs=[unscored]), 4)
    assert run.samples == [] and run.metrics.reduce()["frac_reward_zero_std"] == 1.0


def only_odd(completions: list[Any], **kwargs: Any) -> list[float | None]:
    numbers = [int(completion[0]["content"]) for completion in completions]
    return [float(number) if number % 2 else None for number in numbers]


def test_an_unscored_rollout_in_a_kept_group_has_no_advantage() -> None:
    spec = make_spec(
        lambda request, number: reply(str(number)),
        config={"num_generations": 3},
        reward_funcs=[only_odd],
        num_epochs=0.5,
    )
    run = run_to_end(spec, 2)  # prompt 0: None, 1, None (dropped); prompt 1: 3, None, 5
    assert run.done == [GroupDone(0, 0), GroupDone(1, 3)]
    assert [sample.advantage for sample in run.samples] == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def broken_reward(**kwargs: Any) -> list[float]:
    return [float("nan")] * 2


def test_a_bad_reward_ends_the_loop() -> None:
    with pytest.raises(RewardError, match="'broken_reward' returned nan"):
        run_to_end(make_spec(reward_funcs=[broken_reward]), 4)


# Pacing


def test_one_group_runs_until_the_first_tells_the_length() -> None:
    async def main() -> None:
        spec = make_spec()
        async with running(spec) as run:
            run.client.gates = {0: asyncio.Event(), 1: asyncio.Event()}
            await run.until(lambda: len(run.client.requests) == 2)
            await run.settle()
            assert len(run.client.requests) == 2
            run.client.gates[0].set()
            await run.settle()
            assert len(run.client.requests) == 2, "half a group tells nothing"
            run.client.gates[1].set()
            await run.until(lambda: len(run.done) == 4)

    asyncio.run(main())


def test_groups_start_only_within_the_allowance_and_after_samples_are_taken() -> None:
    async def main() -> RunningLoop:
        group_tokens = 2 * (len(PROMPT.format(0)) + 2)
        async with running(make_spec(token_allowance=2 * group_tokens)) as run:
            await run.until(lambda: len(run.done) == 2)
            await run.settle()
            assert len(run.client.requests) == 4, "two groups are queued, and a third would not fit"
            run.state.taken_tokens = group_tokens - 1
            await run.settle()
            assert len(run.client.requests) == 4
            run.state.taken_tokens = group_tokens
            await run.until(lambda: len(run.done) == 3)
            await run.settle()
            assert len(run.client.requests) == 6
            run.state.token_allowance = 3 * group_tokens
            await run.until(lambda: len(run.done) == 4)
        return run

    assert asyncio.run(main()).metrics.reduce()["rollout/backpressure_s"] > 0


def test_dropped_groups_do_not_fill_the_allowance() -> None:
    run = run_to_end(make_spec(lambda request, number: reply("1"), token_allowance=0), 4)
    assert run.samples == [] and len(run.done) == 4


def test_rollouts_in_flight_are_bounded() -> None:
    async def main() -> None:
        async with running(make_spec(config={"max_concurrent_rollouts": 3, "num_generations": 4})) as run:
            run.client.gates = {number: asyncio.Event() for number in range(4)}
            await run.until(lambda: len(run.client.requests) == 3)
            await run.settle()
            assert len(run.client.requests) == 3
            run.client.gates[1].set()
            await run.until(lambda: len(run.client.requests) == 4)
            for gate in run.client.gates.values():
                gate.set()
            await run.until(lambda: len(run.done) == 4)

    asyncio.run(main())


def test_a_group_is_as_old_as_its_first_rollout() -> None:
    async def main() -> RunningLoop:
        spec = make_spec(
            lambda request, number: reply(str(number % 2), version=str(number)), config={"max_concurrent_rollouts": 1}
        )
        async with running(spec, model_version=3) as run:
            run.client.gates = {0: asyncio.Event()}
            await run.until(lambda: len(run.client.requests) == 1)
            run.state.model_version = 4
            run.client.gates[0].set()
            await run.until(lambda: len(run.done) == 4)
        return run

    run = asyncio.run(main())
    assert [sample.model_version for sample in run.samples] == [3, 3, 4, 4, 4, 4, 4, 4]
    assert [sample.versions[0] for sample in run.samples] == list(range(8))


# Prompts that yield nothing


def test_a_prompt_too_long_is_skipped_and_counted() -> None:
    long = {"prompt": [{"role": "user", "content": "x" * 60}], "answer": "a"}
    run = run_to_end(make_spec(dataset=[question(0), long, question(2)]), 3)
    assert sorted(done.num_samples for done in run.done) == [0, 2, 2]
    assert {sample.row_index for sample in run.samples} == {0, 2}
    assert run.metrics.reduce()["rollout/prompt_too_long_count"] == 1
    assert len(run.client.requests) == 4


def test_a_whole_epoch_of_prompts_that_are_too_long_raises() -> None:
    with pytest.raises(
        DatasetError, match=r"none of the 4 prompts of epoch 0 .* 4 too long for the server's max_model_len"
    ):
        run_to_end(make_spec(max_model_len=len(PROMPT.format(0))), 5)


@dataclasses.dataclass
class FilterConfig(AsyncGRPOConfig):
    """Options of a user's own loop."""

    rejected: tuple[int, ...] = ()


class FilterLoop(AsyncRolloutLoop):
    """Rejects some rows, and notes what it was asked."""

    async def setup(self) -> None:
        self.asked: list[tuple[int, str, int]] = []

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        assert isinstance(self.config, FilterConfig)
        self.asked.append((row_index, row["answer"], epoch))
        return row_index not in self.config.rejected


def filter_config(*rejected: int) -> FilterConfig:
    return FilterConfig(num_generations=2, max_completion_length=16, num_sampler_logprobs=2, rejected=rejected)


def test_filtered_prompts_count_as_done() -> None:
    run = run_to_end(make_spec(config=filter_config(1, 2), loop_cls=FilterLoop, num_epochs=2.0), 8)
    assert sorted(done.num_samples for done in run.done) == [0, 0, 0, 0, 2, 2, 2, 2]
    assert {sample.row_index for sample in run.samples} == {0, 3}
    assert isinstance(run.loop, FilterLoop)
    expected = [int(row) for epoch in (0, 1) for row in np.random.default_rng([42, epoch]).permutation(4)]
    assert run.loop.asked == [(row, f"a{row}", index // 4) for index, row in enumerate(expected)]
    assert len({sample.group_id for sample in run.samples}) == 4


def test_filtering_out_a_whole_epoch_raises() -> None:
    with pytest.raises(DatasetError, match=r"none of the 4 prompts of epoch 0 .* 4 rejected by filter_prompt"):
        run_to_end(make_spec(config=filter_config(0, 1, 2, 3), loop_cls=FilterLoop, num_epochs=None), 5)


# Failures of the server


def failing(failed: Callable[[int], bool]) -> Callable[[GenerateRequest, int], GenerateResponse]:
    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        if failed(number):
            raise ServerResponseError("POST /inference/v1/generate", 500, f"broken {number}")
        return reply(str(number % 2))

    return answer


def test_a_group_goes_on_with_the_rollouts_that_are_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = run_to_end(make_spec(failing(lambda number: number == 0), config={"num_generations": 3}), 4)
    assert sorted(done.num_samples for done in run.done) == [2, 3, 3, 3]
    assert run.metrics.reduce()["rollout/failed_count"] == 1
    assert "broken 0" in caplog.text


def test_a_group_with_one_rollout_left_is_dropped() -> None:
    run = run_to_end(make_spec(failing(lambda number: number == 1)), 4)
    assert sorted(done.num_samples for done in run.done) == [0, 2, 2, 2]
    assert run.metrics.reduce()["rollout/failed_group_count"] == 1


def test_failures_in_a_row_end_the_loop_with_the_last_error() -> None:
    with pytest.raises(RolloutWorkerError, match=f"{MAX_CONSECUTIVE_FAILURES} rollouts failed in a row.*broken"):
        run_to_end(make_spec(failing(lambda number: True), num_epochs=None), 100)


def test_a_success_in_between_keeps_the_loop_running() -> None:
    every_eighth = failing(lambda number: number % 8 != 0)
    run = run_to_end(make_spec(every_eighth, num_epochs=None), 3 * MAX_CONSECUTIVE_FAILURES)
    assert run.metrics.reduce()["rollout/failed_count"] > MAX_CONSECUTIVE_FAILURES


def test_a_server_that_lacks_something_ends_the_loop_at_once() -> None:
    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        raise ServerIncompatibleError("start vLLM with --enable-scale-out")

    with pytest.raises(ServerIncompatibleError, match="--enable-scale-out"):
        run_to_end(make_spec(answer), 1)


# Hooks


class AgentLoop(AsyncRolloutLoop):
    """Two turns by hand, a reward of its own, and its own advantages."""

    async def setup(self) -> None:
        self.events = ["setup"]

    async def close(self) -> None:
        self.events.append("close")

    async def generate_one(
        self, prompt: list[Message], tools: Sequence[Callable[..., Any]], group_id: int = 0
    ) -> Rollout:
        assert [tool.__name__ for tool in tools] == ["run_to_end"]
        prompt_ids = encode(prompt[0]["content"])
        prompt[0]["content"] = "changed by the agent"
        turns = [await self.generate_one_turn(prompt_ids)]
        turns.append(await self.generate_one_turn([*prompt_ids, *turns[0].output_ids, ord("!")]))
        number = float(text_of(turns[0].output_ids))
        self.events.append(f"group {group_id}")
        ids = turns[0].output_ids + turns[1].output_ids
        return Rollout([{"role": "assistant", "content": text_of(ids)}], ids, turns, reward=number)

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        assert group.rewards is not None
        return 10 * group.rewards


def test_hooks_of_a_custom_loop() -> None:
    spec = make_spec(
        lambda request, number: reply(str(number)),
        config={"max_concurrent_rollouts": 1},
        loop_cls=AgentLoop,
        tools=[run_to_end],
        reward_funcs=[],
        num_epochs=0.25,
    )
    run = run_to_end(spec, 1)
    assert isinstance(run.loop, AgentLoop)
    assert run.loop.events == ["setup", "group 0", "group 0", "close"]
    first, second = run.samples
    prompt = f"q{first.row_index}"
    requests = [text_of(request.token_ids) for request in run.client.requests]
    assert requests == [prompt, f"{prompt}0!", prompt, f"{prompt}2!"], "each rollout has its own copy of the prompt"
    assert [text_of(sample.input_ids.tolist()) for sample in (first, second)] == [f"{prompt}0!1", f"{prompt}2!3"]
    assert first.trained_positions.tolist() == [2, 3, 5, 6]
    assert [sample.advantage for sample in run.samples] == [0.0, 20.0]
    assert len({request.sampling_params.seed for request in run.client.requests}) == 4
    metrics = run.metrics.reduce()
    assert metrics["rewards/rollout/mean"] == 1.0
    assert metrics["rollout/turns_mean"] == metrics["rollout/turns_max"] == 2
    assert metrics["rollout/fork_frac"] == 0 and metrics["rollout/samples_per_rollout"] == 1


class TurnLoop(AsyncRolloutLoop):
    """Samples by itself."""

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        return TurnRecord(prompt_ids, [ord(str(prompt_ids[-1] % 2)), EOS], [-1.0, -2.0])


class BadLoop(AsyncRolloutLoop):
    """Returns something else from its hooks."""

    async def close(self) -> None:
        self.tokenizer.closed = True

    async def generate_one(self, *args: Any, **kwargs: Any) -> Any:
        return "text"


class BadAdvantages(AsyncRolloutLoop):
    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        return np.array([1.0])


def test_a_turn_of_ones_own_needs_no_server() -> None:
    run = run_to_end(make_spec(loop_cls=TurnLoop), 4)
    assert run.client.requests == [] and run.metrics.reduce()["completions/mean_length"] == 2


def test_hooks_that_return_something_else_are_named() -> None:
    spec = make_spec(loop_cls=BadLoop)
    with pytest.raises(RolloutWorkerError, match="generate_one must return a Rollout, got 'text'"):
        run_to_end(spec, 1)
    assert spec.tokenizer.closed, "close runs after a failure, too"
    with pytest.raises(RewardError, match="compute_advantages must return one finite number for each of the 2"):
        run_to_end(make_spec(loop_cls=BadAdvantages), 1)


# Metrics


def test_metrics_of_completions_and_pipeline() -> None:
    answers = ["1", "12", "3333", "3333"]
    spec = make_spec(
        lambda request, number: reply(answers[number % 4], terminated=number % 4 != 2),
        config={"num_generations": 4},
        num_epochs=0.25,
    )
    run = run_to_end(spec, 1)
    metrics = run.metrics.reduce()
    expected = {
        "completions/mean_length": (2 + 3 + 4 + 5) / 4,
        "completions/min_length": 2,
        "completions/max_length": 5,
        "completions/mean_terminated_length": (2 + 3 + 5) / 3,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 5,
        "completions/clipped_ratio": 1 / 4,
        "completions/duplicate_frac": 0,
        "rollout/turns_mean": 1,
        "rollout/samples_per_rollout": 1,
        "rollout/concurrency": 0,
        "rollout/concurrency_cap": 512,
        "rollout/score_queue_size": 0,
        "rollout/vllm_retry_count": 0,
        "rewards/number_reward/mean": (1 + 12 + 3333 + 3333) / 4,
        "frac_reward_zero_std": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    measured = ["duration_s", "generated_tokens_per_s", "score_s", "score_wait_s", "score_block_s"]
    assert all(metrics[f"rollout/{name}"] >= 0 for name in measured)
    assert metrics["rollout/generated_tokens_per_s"] > 0
    assert "rollout/fork_frac" not in metrics, "single turns have no transitions"


def test_retries_are_reported_once() -> None:
    async def main() -> RunningLoop:
        async with running(make_spec()) as run:
            await run.until(lambda: len(run.done) == 4)
            run.client.retry_count = 3
        return run

    assert asyncio.run(main()).metrics.reduce()["rollout/vllm_retry_count"] == 3


def test_the_heartbeat_goes_on_without_rollouts() -> None:
    async def main() -> None:
        async with running(make_spec(token_allowance=0)) as run:
            run.client.gates = {0: asyncio.Event()}
            await run.until(lambda: len(run.client.requests) == 2)
            before = run.state.heartbeat
            await run.settle()
            assert run.state.heartbeat > before > 0

    asyncio.run(main())

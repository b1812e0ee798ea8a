"""The loop with tools and environments, and with user code that fails or hangs."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from ajgrpo.errors import ConfigError, RewardError, RolloutWorkerError, ServerResponseError
from ajgrpo.inference.protocol import GenerateRequest, GenerateResponse
from ajgrpo.rollout import loop as loop_module
from ajgrpo.rollout.episode import RolloutContext
from ajgrpo.types import RolloutSample
from tests.rollout.agents import (
    AsyncGame,
    BrokenReset,
    BrokenReward,
    Counter,
    agent_spec,
    async_add,
    byte_tokenizer,
    call,
    hang,
    multiply,
    prompt_text,
    say,
)
from tests.rollout.fakes import Answer, number_reward, question, run_to_end, running

ONE_AT_A_TIME = {"max_completion_length": 256, "max_concurrent_rollouts": 1}


def tools_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """The last tool result as a number."""
    results = [[message["content"] for message in c if message["role"] == "tool"] for c in completions]
    return [float(found[-1]) if found and found[-1].isdigit() else 0.0 for found in results]


def rollouts(first_turn: Callable[[str, int], GenerateResponse]) -> Answer:
    """Answers a rollout's first turn by its prompt and the rollout's number; after a tool's result says ``Done.``."""
    numbers = itertools.count()

    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        text = prompt_text(request)
        return say("Done.") if "<tool_response>" in text else first_turn(text, next(numbers))

    return answer


def uses_tools(text: str, number: int) -> GenerateResponse:
    """Every second rollout multiplies and adds, then answers; the others answer at once."""
    return (
        say("Wait.\n" + call("multiply", a=3, b=4) + "\n" + call("async_add", a=3, b=4)) if number % 2 else say("No.")
    )


def trained_text(sample: RolloutSample) -> str:
    return str(byte_tokenizer().decode(sample.input_ids[sample.trained_positions].tolist()))


def test_a_tool_conversation_is_one_sample_whose_answers_are_masked() -> None:
    spec = agent_spec(
        rollouts(uses_tools), tools=[multiply, async_add], reward_funcs=[tools_reward], config=ONE_AT_A_TIME
    )
    run = run_to_end(spec, 4)
    metrics = run.metrics.reduce()
    both = [sample for sample in run.samples if sample.advantage > 0]
    assert both and all(
        trained_text(sample)
        == f"Wait.\n{call('multiply', a=3, b=4)}\n{call('async_add', a=3, b=4)}<|im_end|>Done.<|im_end|>"
        for sample in both
    )
    text = byte_tokenizer().decode(both[0].input_ids.tolist())
    assert "<tool_response>\n12\n</tool_response>\n<tool_response>\n7\n</tool_response>" in text
    assert metrics["rollout/fork_frac"] == 0 and metrics["tools/failure_frequency"] == 0
    assert metrics["tools/call_frequency"] == pytest.approx(1.0) and len(both) == 4
    assert metrics["tools/parallel_calls_mean"] == 2 and metrics["tools/loop_exhausted_frac"] == 0
    assert metrics["tools/multiply/call_count"] == len(both) and metrics["rollout/turns_max"] == 2


def test_the_loop_of_calls_is_bounded() -> None:
    spec = agent_spec(
        lambda request, number: say(call("multiply", a=number, b=1)),
        tools=[multiply],
        reward_funcs=[tools_reward],
        config={**ONE_AT_A_TIME, "max_tool_calling_iterations": 2},
    )
    run = run_to_end(spec, 4)
    assert len(run.client.requests) == 4 * 2 * 3
    assert run.metrics.reduce()["tools/loop_exhausted_frac"] == 1


def test_bad_calls_are_answered_and_counted() -> None:
    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        if "<tool_response>" not in prompt_text(request):
            return say("<tool_call>{broken</tool_call>" if request.sampling_params.seed in broken_seeds else call("x"))
        assert '{"error": ' in prompt_text(request)
        return say(str(number))

    broken_seeds = [
        RolloutContext(prompt_index, 0).next_seed(42) for prompt_index in range(4)
    ]  # the first turn of each group's first rollout

    def last_number(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(completion[-1]["content"]) for completion in completions]

    run = run_to_end(agent_spec(answer, tools=[multiply], reward_funcs=[last_number]), 4)
    metrics = run.metrics.reduce()
    assert metrics["tools/failure_frequency"] == 1 and metrics["tools/call_frequency"] == 1
    assert metrics["tools/unknown_name_count"] == 4


def counts(text: str, number: int) -> GenerateResponse:
    """Every second rollout counts to the target, the others past it."""
    target = int(text.rsplit("Count to ", 1)[1].split(".")[0])
    return say(call("increment", step=target if number % 2 else target + 1))


def test_an_environment_gives_prompt_tools_and_reward() -> None:
    rows = [{**question(index), "target": index + 2} for index in range(4)]
    run = run_to_end(agent_spec(rollouts(counts), dataset=rows, environment_factory=Counter, config=ONE_AT_A_TIME), 4)
    metrics = run.metrics.reduce()
    assert metrics["rewards/Counter/mean"] == metrics["reward"]
    assert metrics["env/reset_s"] >= 0 and metrics["env/reward_s"] >= 0 and metrics["tools/increment/call_count"] == 8
    text = byte_tokenizer().decode(run.client.requests[0].token_ids)
    assert f"q{run.samples[0].row_index} Count to {run.samples[0].row_index + 2}." in text


def test_an_environment_needs_no_dataset() -> None:
    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        done = prompt_text(request).count("<tool_response>") > number % 2
        return say("Done.") if done else say(call("move", action="up"))

    spec = agent_spec(answer, dataset=None, num_epochs=None, environment_factory=AsyncGame)
    run = run_to_end(spec, 4)
    assert sorted(done.prompt_index for done in run.done)[:4] == [0, 1, 2, 3]
    assert "Reach the goal." in prompt_text(run.client.requests[0])
    assert run.metrics.reduce()["rewards/AsyncGame/mean"] >= 1


def test_a_row_sees_only_the_tools_of_its_environment() -> None:
    rows = [{"environment": "game", "target": 3}, {**question(1), "environment": "count", "target": 3}]
    factory = {"game": AsyncGame, "count": Counter}
    spec = agent_spec(
        lambda request, number: say("No."), dataset=rows, environment_factory=factory, tools=[multiply], num_epochs=1.0
    )
    run = run_to_end(spec, 2)
    for request in run.client.requests:
        text = prompt_text(request)
        assert ('"name": "move"' in text) == ("Reach the goal." in text)
        assert ('"name": "increment"' in text) == ("Count to 3." in text) and '"name": "multiply"' in text


# Faults


def test_a_tool_that_hangs_costs_its_rollout_only(caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        return say(call("hang")) if number == 0 else say(str(number))

    config = {**ONE_AT_A_TIME, "num_generations": 3, "rollout_timeout": 0.2}
    spec = agent_spec(answer, tools=[hang], reward_funcs=[number_reward], config=config)
    with caplog.at_level(logging.WARNING):
        run = run_to_end(spec, 4)
    assert sorted(done.num_samples for done in run.done) == [2, 3, 3, 3]
    assert "took longer than rollout_timeout=0.2 s" in caplog.text
    assert run.metrics.reduce()["rollout/failed_count"] == 1


def test_a_rollout_is_tried_again_with_other_seeds() -> None:
    def answer(request: GenerateRequest, number: int) -> GenerateResponse:
        if number == 0:
            raise ServerResponseError("POST /inference/v1/generate", 500, "restarting")
        return say(str(number))

    config = {**ONE_AT_A_TIME, "rollout_retries": 1}
    run = run_to_end(agent_spec(answer, reward_funcs=[number_reward], config=config), 4)
    metrics = run.metrics.reduce()
    assert [done.num_samples for done in run.done] == [2] * 4
    assert metrics["rollout/retry_count"] == 1 and "rollout/failed_count" not in metrics
    assert len({request.sampling_params.seed for request in run.client.requests}) == 9


def test_an_environment_that_raises_costs_its_rollout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenReset, "resets", 0)
    config = {**ONE_AT_A_TIME, "num_generations": 3}
    run = run_to_end(agent_spec(rollouts(counts), environment_factory=BrokenReset, config=config), 4)
    assert run.metrics.reduce()["rollout/failed_count"] == 1
    assert sum(done.num_samples for done in run.done) == 11


def test_the_run_ends_when_every_rollout_fails() -> None:
    rows = [{**question(index), "target": 3} for index in range(4)]
    with pytest.raises(RolloutWorkerError, match=r"8 rollouts failed in a row.*raised OSError: no score"):
        run_to_end(agent_spec(rollouts(counts), dataset=rows, environment_factory=BrokenReward), 5)


class FailingReward:
    """Raises for some groups."""

    def __init__(self, *failing: int):
        self.failing, self.calls = failing, 0

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        self.calls += 1
        if self.calls in self.failing:
            raise OSError(f"judge {self.calls}")
        return [float(index) for index in range(len(completions))]


def test_a_reward_that_raises_once_costs_its_group_only() -> None:
    run = run_to_end(agent_spec(lambda request, number: say("x"), reward_funcs=[FailingReward(2)]), 4)
    assert sorted(done.num_samples for done in run.done) == [0, 2, 2, 2]
    assert run.metrics.reduce()["rollout/failed_group_count"] == 1


def test_a_reward_that_always_raises_ends_the_run() -> None:
    spec = agent_spec(lambda request, number: say("x"), reward_funcs=[FailingReward(*range(1, 99))], num_epochs=None)
    with pytest.raises(RewardError, match=f"raised OSError: judge {loop_module.MAX_REWARD_FAILURES}"):
        run_to_end(spec, 99)


def test_a_straggler_does_not_hold_its_group() -> None:
    async def main() -> Any:
        config = {"max_completion_length": 256, "num_generations": 4, "straggler_timeout": 0}
        spec = agent_spec(lambda request, number: say(str(number)), reward_funcs=[number_reward], config=config)
        async with running(spec) as run:
            run.client.gates = {3: asyncio.Event()}
            await run.until(lambda: len(run.done) >= 4)
        return run

    run = asyncio.run(main())
    assert run.done[0].num_samples >= 2 and run.metrics.reduce()["rollout/straggler_count"] >= 1


def test_a_configuration_that_cannot_work_ends_the_run_at_once() -> None:
    with pytest.raises(ConfigError, match="must return text or None"):
        run_to_end(agent_spec(rollouts(counts), environment_factory=BadReset), 1)


class BadReset(Counter):
    def reset(self, **kwargs: Any) -> Any:
        return 3


def test_the_watch_says_why_nothing_comes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loop_module, "WATCH_S", 0.05)

    async def main(token_allowance: int, reward: float) -> None:
        def same(completions: list[Any], **kwargs: Any) -> list[float]:
            return [reward * index for index in range(len(completions))]

        spec = agent_spec(lambda request, number: say("x"), reward_funcs=[same], token_allowance=token_allowance)
        async with running(spec) as run:
            await run.until(lambda: "no sample for" in caplog.text and len(run.done) >= 1)
            caplog.clear()
            await run.until(lambda: "no sample for" in caplog.text)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main(100_000, 0.0))
        assert "4 groups with equal rewards" in caplog.text
        caplog.clear()
        asyncio.run(main(1, 1.0))
        assert "the trainer takes none of the" in caplog.text


def test_the_cap_follows_the_servers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "LOAD_POLL_S", 0.01)
    usage = itertools.chain([0.9] * 2, itertools.repeat(0.7))

    async def main() -> Any:
        spec = agent_spec(lambda request, number: say(str(number)), reward_funcs=[number_reward])
        async with running(spec) as run:
            run.client.metrics_text = lambda: metrics_text(next(usage))  # type: ignore[method-assign]
            await run.until(lambda: len(run.done) >= 4 and run.loop._slots.cap < 4)
        return run

    async def metrics_text(cache_usage: float) -> str:
        return (
            f'vllm:kv_cache_usage_perc{{engine="0"}} {cache_usage}\nvllm:num_requests_waiting{{engine="0"}} 2.0\n'
            'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_preemptions_total{engine="0"} 5.0\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1280"} 1.0\n'
        )

    run = asyncio.run(main())
    assert run.loop._slots.cap == 3  # 16 * 1280 / 4096 = 5, then 70 % of it once, rounded down
    metrics = run.metrics.reduce()
    assert metrics["rollout/vllm_running_requests"] == 3 and metrics["rollout/vllm_queued_requests"] == 2
    assert metrics["rollout/vllm_preemption_count"] == 0 and 0.7 <= metrics["rollout/vllm_kv_cache_usage_frac"] <= 0.9

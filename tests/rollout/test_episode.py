"""Turns of one rollout, the sampling request, and what is read off a reply."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerError, ServerIncompatibleError
from ajgrpo.inference.protocol import GenerateResponse, SamplingParams, WeightSpan
from ajgrpo.rollout.api import PromptTooLongError
from ajgrpo.rollout.calls import CallFormat, ParsedText, ToolCall
from ajgrpo.rollout.chat import ChatFormat
from ajgrpo.rollout.episode import Episode, RolloutContext, read_turn, run_episode, sampling_params, token_versions
from ajgrpo.types import Message, TurnRecord
from tests.rollout.fakes import EOS, CharTokenizer, encode, reply, text_of

PROMPT: list[Message] = [{"role": "user", "content": "q"}]


CALLS = CallFormat("a", lambda text: ParsedText(text, [ToolCall("t")] if text == "a" else []))
"""The text ``a`` is a call."""


def converse(answers: list[str], responses: list[list[Message]] | None = None, **limits: Any) -> Episode:
    """Runs an episode whose turns give ``answers`` in order; a missing answer is a prompt that is too long."""
    remaining, pending = list(answers), list(responses or [])

    async def sample_turn(prompt_ids: list[int]) -> TurnRecord:
        if not remaining:
            raise PromptTooLongError("too long")
        output_ids = [*encode(remaining.pop(0)), EOS]
        return TurnRecord(prompt_ids, output_ids, [-1.0] * len(output_ids))

    async def respond(calls: Sequence[ToolCall]) -> list[Message]:
        assert calls == [ToolCall("t")]
        return pending.pop(0)

    chat = ChatFormat(CharTokenizer(), call_format=CALLS)
    if responses is None:
        return asyncio.run(run_episode(PROMPT, chat, sample_turn))
    return asyncio.run(run_episode(PROMPT, chat, sample_turn, respond, tools=[{}], **limits))


def test_a_single_turn() -> None:
    rollout = converse(["7"]).rollout
    assert rollout.completion == [{"role": "assistant", "content": "7"}]
    assert rollout.completion_ids == [ord("7"), EOS]
    assert [text_of(turn.prompt_ids) for turn in rollout.turns] == ["user:q;assistant:"]
    assert rollout.reward is None


def test_answers_go_into_the_next_prompt_until_there_are_none() -> None:
    episode = converse(["a", "b"], [[{"role": "tool", "content": "t"}]])
    assert not episode.exhausted
    rollout = episode.rollout
    assert [message["content"] for message in rollout.completion] == ["a", "t", "b"]
    assert text_of(rollout.turns[1].prompt_ids) == "user:q;assistant:a;tool:t;assistant:"
    assert text_of(rollout.completion_ids) == "ab"


def test_answers_are_bounded() -> None:
    endless = [[{"role": "tool", "content": "t"}]] * 9
    for bound in (0, 2):
        episode = converse(["a"] * 9, endless, max_responses=bound)
        assert len(episode.rollout.turns) == bound + 1 and episode.exhausted
        assert episode.rollout.completion[-1]["role"] == "assistant"
    assert not converse(["a", "a", "b"], endless, max_responses=2).exhausted


def test_a_later_prompt_that_is_too_long_ends_the_conversation() -> None:
    rollout = converse(["a"], [[{"role": "tool", "content": "t"}]]).rollout
    assert [message["content"] for message in rollout.completion] == ["a", "t"] and len(rollout.turns) == 1
    with pytest.raises(PromptTooLongError):
        converse([])


def test_seeds_are_unique_and_the_same_in_every_run() -> None:
    def seeds(seed: int) -> list[int]:
        found = []
        for prompt_index, generation in product(range(40), range(8)):
            context = RolloutContext(prompt_index, generation)
            found += [context.next_seed(seed) for _ in range(3)]
        return found

    assert len({*seeds(0), *seeds(1)}) == 2 * 40 * 8 * 3
    assert seeds(1) == seeds(1)
    assert all(0 <= seed < 2**53 for seed in seeds(0))
    assert RolloutContext(5, 3).next_seed(42) == 3870074297783200, "a resumed run must not depend on the version"


def request(config: AsyncGRPOConfig, room: int = 100, mask: bool = False) -> SamplingParams:
    return sampling_params(config, room=room, seed=9, eos_token_ids=(EOS,), returns_sampling_mask=mask)


def test_sampling_params_follow_the_configuration() -> None:
    config = AsyncGRPOConfig(temperature=0.7, max_completion_length=16, num_sampler_logprobs=8)
    assert request(config) == SamplingParams(max_tokens=16, temperature=0.7, seed=9, logprobs=9, stop_token_ids=(EOS,))
    assert request(config, room=3).max_tokens == 3
    truncated = dataclasses.replace(config, top_k=20, top_p=0.9, min_p=0.1)
    params = request(truncated)
    assert (params.top_k, params.top_p, params.min_p, params.logprobs) == (20, 0.9, 0.1, 21)
    assert request(truncated, mask=True).logprobs == 9
    assert request(AsyncGRPOConfig(score_centering=False, num_sampler_logprobs=0)).logprobs == 1


def test_a_turn_holds_the_most_likely_tokens_and_versions() -> None:
    config = AsyncGRPOConfig(num_sampler_logprobs=2)
    turn = read_turn([1, 2], reply("7", version="3"), config)
    assert (turn.prompt_ids, turn.output_ids) == ([1, 2], [55, EOS])
    assert turn.output_log_probs == [-1 / 8, -2 / 8]
    assert turn.output_sampler_logprobs == [
        {57: -1 / 8 + 2 / 64, 56: -1 / 8 + 1 / 64},
        {2: -2 / 8 + 2 / 64, 1: -2 / 8 + 1 / 64},
    ]
    assert turn.output_versions == [3, 3]
    assert turn.output_sampling_mask is None and turn.finish_reason == "stop"
    uncentered = AsyncGRPOConfig(score_centering=False, num_sampler_logprobs=0)
    assert read_turn([1], reply("7"), uncentered).output_sampler_logprobs is None


def test_candidate_sets_come_from_the_server_or_from_the_log_probs() -> None:
    config = AsyncGRPOConfig(top_k=2, num_sampler_logprobs=1)
    response = GenerateResponse(
        token_ids=[7],
        finish_reason="length",
        log_probs=[-0.5],
        top_log_probs=[{7: -0.5, 8: -0.4, 9: -math.inf}],
    )
    turn = read_turn([1], response, config)
    assert turn.output_sampling_mask == [[7, 8]] and turn.output_sampler_logprobs == [{8: -0.4}]
    turn = read_turn([1], dataclasses.replace(response, sampling_mask=[[4, 5]]), config)
    assert turn.output_sampling_mask == [[7, 4, 5]], "the sampled token is always a candidate"


def test_versions_of_tokens() -> None:
    spans = (WeightSpan("default", 0, 2), WeightSpan("4", 2, 3), WeightSpan("5", 3, 9))
    assert token_versions(spans, 5) == [-1, -1, 4, 5, 5]
    assert token_versions((), 2) == [-1, -1]


def test_replies_that_cannot_be_trained_on() -> None:
    config = AsyncGRPOConfig()
    with pytest.raises(ServerIncompatibleError, match="no log-probs"):
        read_turn([1], GenerateResponse([7], "stop"), config)
    response = dataclasses.replace(reply("7"), log_probs=[-math.inf, -1.0])
    with pytest.raises(ServerError, match="not finite"):
        read_turn([1], response, config)

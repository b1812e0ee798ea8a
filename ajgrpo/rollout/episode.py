"""One rollout: the turns of a conversation, each one request to the server.

    messages ──render──▶ prompt ids ──sample_turn──▶ TurnRecord ──parse──▶ assistant message, tool calls
        ▲                                                                        │
        └───────────── answers (tool results) ◀── respond ◀──────────────────────┘

Left out: who responds (``rollout.tools``). Without tools nobody does, and the conversation has one turn.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ServerError, ServerIncompatibleError
from ajgrpo.inference.protocol import GenerateResponse, SamplingParams, WeightSpan
from ajgrpo.rollout.api import PromptTooLongError
from ajgrpo.rollout.calls import ToolCall
from ajgrpo.rollout.chat import ChatFormat
from ajgrpo.rollout.reconcile import most_likely
from ajgrpo.types import Message, Rollout, TurnRecord

UNKNOWN_VERSION = -1
"""Policy version of a token whose weights carry no number (those that the server was started with)."""

SampleTurn = Callable[[list[int]], Awaitable[TurnRecord]]
Respond = Callable[[Sequence[ToolCall]], Awaitable[list[Message]]]


@dataclasses.dataclass(frozen=True)
class Episode:
    """A finished conversation; ``exhausted`` when it was cut while the model still called tools."""

    rollout: Rollout
    exhausted: bool = False


async def run_episode(
    prompt: Sequence[Message],
    chat: ChatFormat,
    sample_turn: SampleTurn,
    respond: Respond | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    max_responses: int | None = None,
) -> Episode:
    """Generates one conversation: turns, until one calls no tool.

    Args:
        prompt: the messages to start from.
        chat: renders and parses.
        sample_turn: samples one turn from prompt ids.
        respond: answers the calls of a message. None: nobody answers, and there is one turn.
        tools: JSON schemas of the tools on offer.
        max_responses: bound on the answered messages; None: no bound.

    Raises:
        PromptTooLongError: the first turn's prompt is too long; a later one ends the conversation.
    """
    turns: list[TurnRecord] = []
    completion: list[Message] = []
    exhausted = False
    while True:
        prompt_ids = chat.render([*prompt, *completion], tools)
        try:
            turn = await sample_turn(prompt_ids)
        except PromptTooLongError:
            if not turns:
                raise
            break
        turns.append(turn)
        parsed = chat.parse(turn.output_ids, tools, prompt_ids)
        completion.append(parsed.message)
        if respond is None or not parsed.calls:
            break
        if len(turns) - 1 == max_responses:
            exhausted = True
            break
        completion += await respond(parsed.calls)
    completion_ids = [token for turn in turns for token in turn.output_ids]
    return Episode(Rollout(completion=completion, completion_ids=completion_ids, turns=turns), exhausted)


@dataclasses.dataclass
class RolloutContext:
    """Which rollout the running code belongs to; gives its requests their seeds.

    Attributes:
        prompt_index: position of the prompt in the stream of prompts.
        generation_index: 0-based number of the rollout in its group.
        turn: requests made so far.
    """

    prompt_index: int
    generation_index: int
    turn: int = 0

    def next_seed(self, seed: int) -> int:
        """The next request's seed: the same in every run with ``seed``, and no other request's (53 bits, so that JSON
        readers that know only doubles keep it exact)."""
        entropy = (seed, self.prompt_index, self.generation_index, self.turn)
        self.turn += 1
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 11


CURRENT_ROLLOUT: contextvars.ContextVar[RolloutContext] = contextvars.ContextVar("current_rollout")
"""Set in each rollout's task, and in the tasks that it starts."""


def sampling_params(
    config: AsyncGRPOConfig, *, room: int, seed: int, eos_token_ids: tuple[int, ...], returns_sampling_mask: bool
) -> SamplingParams:
    """The configuration's sampling settings for one request.

    Args:
        config: the run's configuration.
        room: most tokens that fit into the server's context.
        seed: the request's own seed.
        eos_token_ids: ids that end the completion.
        returns_sampling_mask: see ``WorkerSpec``.
    """
    top_log_probs = config.num_sampler_logprobs
    if config.truncates_sampling and not returns_sampling_mask:
        top_log_probs = config.top_k  # the whole candidate set: what is outside it comes back as -inf
    return SamplingParams(
        max_tokens=min(config.max_completion_length, room),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty,
        seed=seed,
        logprobs=top_log_probs + 1,  # the sampled token takes one place
        stop_token_ids=eos_token_ids,
    )


def read_turn(prompt_ids: list[int], response: GenerateResponse, config: AsyncGRPOConfig) -> TurnRecord:
    """The turn that a reply tells of, with the sampler's ``num_sampler_logprobs`` most likely tokens.

    Raises:
        ServerIncompatibleError: the reply holds no log-probs.
        ServerError: a sampled token has no finite log-prob.
    """
    if response.log_probs is None or response.top_log_probs is None:
        raise ServerIncompatibleError("the server's reply holds no log-probs, which training needs")
    if not all(math.isfinite(value) for value in response.log_probs):
        raise ServerError("the server gave a sampled token a log-prob that is not finite")
    kept = config.num_sampler_logprobs
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=response.token_ids,
        output_log_probs=response.log_probs,
        output_sampling_mask=_candidates(response) if config.truncates_sampling else None,
        output_sampler_logprobs=[most_likely(top, kept) for top in response.top_log_probs] if kept else None,
        output_versions=token_versions(response.weight_spans, len(response.token_ids)),
        finish_reason=response.finish_reason,
    )


def _candidates(response: GenerateResponse) -> list[list[int]]:
    """For each token the ids that it could have been, itself included."""
    assert response.top_log_probs is not None
    sets = response.sampling_mask
    if sets is None:
        sets = [[token for token, value in top.items() if value > -math.inf] for top in response.top_log_probs]
    return [[*ids] if token in ids else [token, *ids] for token, ids in zip(response.token_ids, sets, strict=True)]


def token_versions(spans: Sequence[WeightSpan], num_tokens: int) -> list[int]:
    """The policy version of each token; ``UNKNOWN_VERSION`` where the label is no number or no span covers it."""
    versions = [UNKNOWN_VERSION] * num_tokens
    for span in spans:
        try:
            version = int(span.version)
        except ValueError:
            continue
        versions[span.start : span.end] = [version] * len(versions[span.start : span.end])
    return versions

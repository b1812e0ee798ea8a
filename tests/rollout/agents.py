"""Tools, environments and a tokenizer for the tests of agents; all importable, so that they can be pickled."""

from __future__ import annotations

import functools
import threading
from typing import Any

from transformers import AutoTokenizer

from ajgrpo.inference.protocol import GenerateResponse
from ajgrpo.parts import model_source
from tests.rollout.fakes import Answer, make_spec


@functools.lru_cache
def byte_tokenizer() -> Any:
    """The shipped tiny tokenizer: all bytes, ChatML markers, a template that knows no tools."""
    return AutoTokenizer.from_pretrained(model_source("builtin:tiny-arithmetic"))


def say(text: str) -> GenerateResponse:
    """A reply of ``text`` and the end token."""
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    log_probs = [-(index + 1) / 64 for index in range(len(ids))]
    top = [{token: value} for token, value in zip(ids, log_probs, strict=True)]
    return GenerateResponse(token_ids=ids, finish_reason="stop", log_probs=log_probs, top_log_probs=top)


def prompt_text(request: Any) -> str:
    return str(byte_tokenizer().decode(request.token_ids))


def call(name: str, **arguments: Any) -> str:
    import json

    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def agent_spec(answer: Answer, **overrides: Any) -> Any:
    """A spec with the byte tokenizer, room for tools, and one rollout at a time so that requests come in order."""
    tokenizer = byte_tokenizer()
    fields: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_model_len": 4096,
        "eos_token_ids": (tokenizer.eos_token_id,),
        "token_allowance": 100_000,
        "reward_funcs": [],
        "config": {"max_completion_length": 256},
    }
    return make_spec(answer, **fields | overrides)


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


def broken(text: str = "x") -> str:
    """Raises.

    Args:
        text: Anything.
    """
    raise ValueError(f"bad {text}")


def leave() -> None:
    """Tries to end the process."""
    raise SystemExit(3)


NEVER = threading.Event()


def hang() -> str:
    """Never returns."""
    NEVER.wait()
    return ""


class Counter:
    """Counts up to the row's target; notes how often it was made."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.counter = 0

    def reset(self, target: int, **kwargs: Any) -> str:
        self.counter, self.target, self.row = 0, target, kwargs
        return f" Count to {target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increments the counter.

        Args:
            step: Value to add.
        """
        self.counter += step
        return self.counter

    def _private(self) -> None:
        """No tool."""


class AsyncGame:
    """Gives its own prompt; everything is async."""

    async def reset(self, **kwargs: Any) -> str:
        self.moves: list[str] = []
        return "Reach the goal."

    async def get_reward(self) -> float | None:
        return float(len(self.moves)) if self.moves else None

    async def move(self, action: str) -> str:
        """Moves.

        Args:
            action: Where to.
        """
        self.moves.append(action)
        return f"moved {action}"


class BrokenReset(Counter):
    """Fails now and then."""

    fail_at: tuple[int, ...] = (1,)
    resets = 0

    def reset(self, **kwargs: Any) -> str:
        number = BrokenReset.resets
        BrokenReset.resets += 1
        if number in self.fail_at:
            raise OSError(f"reset {number}")
        return super().reset(3, **kwargs)


class BrokenReward(Counter):
    """Cannot score."""

    def get_reward(self) -> float:
        raise OSError("no score")

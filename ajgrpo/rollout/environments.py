"""Environments: objects that a rollout acts on through their methods.

    row ──▶ name ──▶ idle object, or a new one ──▶ reset(**row) ──▶ rollout calls its methods ──▶ get_reward()
                         ▲                                                                          │
                         └───────────────────── back in the pool ◀── all went well ◀────────────────┘

Making an environment may be costly, so objects are used again, one rollout at a time. One that raised, or whose rollout
did not end well, is let go: its state is unknown.

Reserved methods: ``reset`` (required; returns text or None) and ``get_reward`` (optional; returns a number or None).
Every other public method is a tool. All may be ``async``; the others run in threads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import numbers
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from ajgrpo.errors import ConfigError, DatasetError, RewardError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.threads import UserThreads
from ajgrpo.rollout.tools import ToolFunction, describe_tools
from ajgrpo.types import Message

EnvironmentFactory = Callable[[], Any]

RESERVED_METHODS = ("reset", "get_reward")

ROUTE = "environment"
"""Column that names a row's environment, where there are several."""


class EnvironmentPool:
    """Hands out environments, each to one rollout at a time.

    Args:
        factory: makes an environment, or one factory for each name.
        threads: where synchronous methods run.
        metrics: gets ``env/reset_s`` and ``env/reward_s``.
    """

    def __init__(
        self,
        factory: EnvironmentFactory | Mapping[str, EnvironmentFactory],
        threads: UserThreads,
        metrics: Metrics,
    ):
        self._routed = isinstance(factory, Mapping)
        self._factories: dict[str, EnvironmentFactory] = (
            dict(factory) if isinstance(factory, Mapping) else {"": factory}
        )
        self._idle: dict[str, list[Any]] = {name: [] for name in self._factories}
        self._threads, self._metrics = threads, metrics

    @contextlib.asynccontextmanager
    async def rollout(self, row: Mapping[str, Any], messages: Sequence[Message]) -> AsyncIterator[EnvironmentRollout]:
        """An environment, reset for one rollout; back in the pool when the block ends without an error.

        Args:
            row: the dataset's columns; empty without a dataset.
            messages: the row's prompt; may be empty.

        Raises:
            DatasetError: the row names no known environment.
            ConfigError: the factory's object is no environment, or there is no prompt.
        """
        name, arguments = self._route(row)
        environment = self._idle[name].pop() if self._idle[name] else await self._make(name)
        with self._metrics.timer("env/reset_s"):
            text = await self._invoke(environment.reset, **arguments)
        prompt = prompt_with(messages, text, type(environment))
        yield EnvironmentRollout(environment, prompt, self._invoke, self._metrics)
        self._idle[name].append(environment)

    def _route(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The environment's name and the arguments of ``reset``, in copies that it may change."""
        if not self._routed:
            return "", copy.deepcopy(dict(row))
        name = row.get(ROUTE)
        if not isinstance(name, str) or name not in self._factories:
            known = ", ".join(repr(key) for key in self._factories)
            raise DatasetError(
                f"with several environments, each row needs a column {ROUTE!r} that names one of {known}; got {name!r}"
            )
        return name, {key: copy.deepcopy(value) for key, value in row.items() if key != ROUTE}

    async def _make(self, name: str) -> Any:
        environment = await self._threads.run(self._factories[name])
        check_environment(type(environment))
        return environment

    async def _invoke(self, method: Callable[..., Any], **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        return await self._threads.run(functools.partial(method, **arguments))


class EnvironmentRollout:
    """One environment during one rollout.

    Attributes:
        environment: the object.
        prompt: the messages to start from.
        tools: its public methods, bound.
    """

    def __init__(self, environment: Any, prompt: list[Message], invoke: Callable[..., Any], metrics: Metrics) -> None:
        self.environment, self.prompt = environment, prompt
        self.tools = [getattr(environment, name) for name in tool_names(type(environment))]
        self._invoke, self._metrics = invoke, metrics

    async def reward(self) -> tuple[type, float] | None:
        """The environment's class and its reward; None without ``get_reward``, or when that returns None.

        Raises:
            RewardError: it returned something else than a finite number or None.
        """
        kind = type(self.environment)
        if not _has_reward(kind):
            return None
        with self._metrics.timer("env/reward_s"):
            value = await self._invoke(self.environment.get_reward)
        if value is None:
            return None
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(
                f"{kind.__name__}.get_reward() returned {value!r:.200} ({type(value).__name__}); it must return one "
                "finite number, or None (not applicable)"
            )
        return kind, float(value)


def check_environment(kind: type) -> None:
    """Checks that a class can serve as an environment.

    Raises:
        ConfigError: it has no ``reset`` method.
    """
    if not callable(getattr(kind, "reset", None)):
        raise ConfigError(
            f"environment_factory made a {kind.__name__}, which has no reset() method; an environment needs one, which "
            "returns the prompt's text or None"
        )


def check_parts(tools: Sequence[ToolFunction], factory: Any, *, has_dataset: bool) -> None:
    """Checks what can be known about tools and environments before anything starts.

    Raises:
        ConfigError: a tool, or a method of an environment's class, cannot be described; or several environments without
            a dataset that picks one for each row.
    """
    describe_tools(tools)
    for kind in classes_of(factory):
        check_environment(kind)
        describe_tools([*tools, *(getattr(kind, name) for name in tool_names(kind))])
    if isinstance(factory, Mapping) and not has_dataset:
        raise ConfigError(
            f"environment_factory is a mapping, so train_dataset must have a column {ROUTE!r} that picks one for each "
            "row; pass a dataset, or one factory"
        )


def tool_names(kind: type) -> list[str]:
    """The public methods of an environment's class but the reserved ones, in alphabetical order."""
    return [
        name
        for name, _ in inspect.getmembers(kind, inspect.isroutine)
        if not name.startswith("_") and name not in RESERVED_METHODS
    ]


def classes_of(factory: Any) -> list[type]:
    """The classes among the factories: what is known about the environments before one is made."""
    factories = factory.values() if isinstance(factory, Mapping) else [factory]
    return [each for each in factories if isinstance(each, type)]


def prompt_with(messages: Sequence[Message], text: Any, kind: type) -> list[Message]:
    """The prompt, with what ``reset`` returned at the end of its last user message.

    Raises:
        ConfigError: ``reset`` returned neither text nor None, or there is no prompt at all.
    """
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{kind.__name__}.reset() must return text or None, got {type(text).__name__}")
    prompt = [dict(message) for message in messages]
    if not text:
        if not prompt:
            raise ConfigError(
                f"{kind.__name__}.reset() returned no text, and the dataset has no column 'prompt': there is no prompt"
            )
        return prompt
    for message in reversed(prompt):
        if message.get("role") == "user":
            content = message.get("content")
            message["content"] = (
                [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text
            )
            return prompt
    return [*prompt, {"role": "user", "content": text}]


def _has_reward(kind: type) -> bool:
    return callable(getattr(kind, "get_reward", None))

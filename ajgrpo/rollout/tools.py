"""Tools: Python functions that the model may call.

    calls of a message ──▶ known? ──▶ arguments fit the schema? ──▶ run ──▶ text ──▶ one tool message a call, in order
                             └──────────────┴─ no: an error text ─────────────────────┘

The schema that the model sees comes from type hints and the Google-style docstring, by transformers. Synchronous
functions run in threads, asynchronous ones are awaited; the calls of one message run one after the other. Nothing that
the model writes, and nothing that a tool raises, leaves this module as an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from ajgrpo.errors import ConfigError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.calls import ToolCall, clean
from ajgrpo.rollout.threads import UserThreads
from ajgrpo.types import Message

ToolFunction = Callable[..., Any]

MAX_ERROR_CHARS = 2000
"""Length of an error text that the model gets: enough to act on, not a whole page of somebody's log."""

MAX_RESULT_CHARS = 1_000_000
"""Length at which a tool's result is cut: no context holds more, and tokenizing it would hold up the event loop."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function and what the model is told about it.

    Attributes:
        name: its ``__name__``.
        schema: JSON schema in the form that chat templates take.
        function: the function.
        is_async: whether a call gives an awaitable.
    """

    name: str
    schema: dict[str, Any]
    function: ToolFunction
    is_async: bool

    @property
    def properties(self) -> dict[str, Any]:
        """Argument name → its schema."""
        return dict(self.schema["function"]["parameters"].get("properties", {}))

    @property
    def required(self) -> list[str]:
        """Arguments without a default."""
        return list(self.schema["function"]["parameters"].get("required", []))


def describe_tool(function: ToolFunction) -> Tool:
    """The tool of a function or bound method.

    Raises:
        ConfigError: it has no name, or hints or docstring that give no schema.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise ConfigError(
            f"a tool must be a function with a name, which the model calls it by, got {function!r:.200}; write a "
            "module-level function"
        )
    return Tool(name, _schema(getattr(function, "__func__", function)), function, inspect.iscoroutinefunction(function))


@functools.lru_cache(maxsize=1024)
def _schema(function: ToolFunction) -> dict[str, Any]:
    try:
        return dict(get_json_schema(function))
    # NameError, TypeError: hints that cannot be resolved; ValueError: broken "(choices: …)".
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as exc:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"tool {name!r} cannot be described to the model: {exc}. It needs a type hint for each argument, and a "
            "docstring with a description and an 'Args:' section that describes each argument"
        ) from exc


def describe_tools(functions: Sequence[ToolFunction]) -> list[Tool]:
    """The tools of several functions.

    Raises:
        ConfigError: one cannot be described, or two have the same name.
    """
    tools = [describe_tool(function) for function in functions]
    names = [tool.name for tool in tools]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"tools and an environment's methods must have different names, got twice: {repeated}")
    return tools


class ToolSession:
    """The tool calls of one rollout.

    Args:
        tools: what may be called.
        threads: where synchronous functions run.
        metrics: gets ``tools/*`` of every call.

    Attributes:
        call_count: calls made.
        failure_count: how many failed: unreadable, unknown, wrong arguments, or raised.
    """

    def __init__(self, tools: Sequence[Tool], threads: UserThreads, metrics: Metrics):
        self._tools, self._threads, self._metrics = {tool.name: tool for tool in tools}, threads, metrics
        self.call_count = self.failure_count = 0

    async def respond(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Runs the calls of one message; one tool message for each, in the same order."""
        if calls:
            self._metrics.add("tools/parallel_calls_mean", len(calls))
        return [await self._answer(call) for call in calls]

    async def _answer(self, call: ToolCall) -> Message:
        self.call_count += 1
        tool = self._tools.get(call.name)
        if tool is None:
            self.failure_count += 1
            if call.error is None:
                self._metrics.add("tools/unknown_name_count", 1)
            known = ", ".join(self._tools) or "none"
            problem = call.error or f"there is no tool named {call.name[:200]!r}; available: {known}"
            return {"role": "tool", "name": call.name[:200], "content": error_text(problem)}
        content = await self._run(tool, call)
        return {"role": "tool", "name": tool.name, "content": content}

    async def _run(self, tool: Tool, call: ToolCall) -> str:
        started = time.perf_counter()
        try:
            content = await self._call(tool, fit_arguments(tool, call.arguments))
            failed = False
        except ToolError as exc:
            content, failed = error_text(str(exc)), True
        seconds = time.perf_counter() - started
        self.failure_count += failed
        self._metrics.add("tools/latency_s", seconds)
        self._metrics.add(f"tools/{tool.name}/latency_s", seconds)
        self._metrics.add(f"tools/{tool.name}/call_count", 1)
        self._metrics.add(f"tools/{tool.name}/failure_count", failed)
        return content

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> str:
        if not tool.is_async:
            return await self._threads.run(functools.partial(_call_now, tool, arguments))
        task = asyncio.current_task()
        try:
            return result_text(await tool.function(**arguments))
        except asyncio.CancelledError as exc:
            if task is not None and task.cancelling():
                raise  # the rollout's time is over, or the run ends
            raise ToolError("the call was cancelled") from exc
        except (
            Exception,
            SystemExit,
            KeyboardInterrupt,
        ) as exc:  # a failing tool is the model's to deal with, never the end of the run
            raise _tool_error(tool, exc) from exc


class ToolError(Exception):
    """A call that failed; the message is for the model."""


def _call_now(tool: Tool, arguments: dict[str, Any]) -> str:
    try:
        return result_text(tool.function(**arguments))
    except BaseException as exc:  # as above, and whatever is raised in the thread is the tool's
        raise _tool_error(tool, exc) from exc


def _tool_error(tool: Tool, exc: BaseException) -> ToolError:
    log.debug("tool %s failed", tool.name, exc_info=exc)
    try:
        detail = str(exc)
    except Exception:  # an exception whose own text cannot be made
        detail = ""
    return ToolError(f"{type(exc).__name__}: {detail}" if detail else type(exc).__name__)


def result_text(result: Any) -> str:
    """A tool's result as the content of a message: text as it is, anything else as JSON, or by ``str``.

    Example: ``result_text({"sum": 7}) == '{"sum": 7}'``.
    """
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    if len(result) > MAX_RESULT_CHARS:
        result = result[:MAX_RESULT_CHARS] + " … (cut)"
    return str(clean(result))


def error_text(problem: str) -> str:
    """The content of a tool message that reports an error."""
    return json.dumps({"error": str(clean(problem[:MAX_ERROR_CHARS]))}, ensure_ascii=False)


def fit_arguments(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the types that the schema asks for.

    Text is read as JSON where a number, boolean, list or object is wanted (some formats write every argument as text);
    a whole number passes where a float is wanted, and ``3.0`` as an integer.

    Raises:
        ToolError: one is unknown, missing, or of another type.
    """
    properties = tool.properties
    if unknown := sorted(set(arguments) - set(properties)):
        raise ToolError(f"{tool.name} has no argument {_listed(unknown)}; its arguments: {_listed(properties)}")
    if missing := [name for name in tool.required if name not in arguments]:
        raise ToolError(f"{tool.name} needs the argument {_listed(missing)}")
    return {name: _fit(name, value, properties[name]) for name, value in arguments.items()}


def _listed(names: Sequence[str] | dict[str, Any]) -> str:
    return ", ".join(repr(name[:100]) for name in list(names)[:20]) or "none"


def _fit(name: str, value: Any, schema: dict[str, Any]) -> Any:
    declared = schema.get("type")
    wanted = [declared] if isinstance(declared, str) else list(declared or [])
    if not wanted:
        return value
    if schema.get("nullable"):
        wanted.append("null")
    candidate = value
    if isinstance(value, str) and "string" not in wanted:
        # What is no JSON stays text, which does not fit.
        with contextlib.suppress(ValueError, RecursionError):
            candidate = json.loads(value.lower() if value in ("True", "False", "TRUE", "FALSE") else value)
    for kind in wanted:
        fits, fitted = _fit_kind(candidate, kind)
        if fits and ("enum" not in schema or fitted in schema["enum"]):
            return fitted
    options = f"one of {schema['enum']}" if "enum" in schema else " or ".join(wanted)
    raise ToolError(f"argument {name!r} must be {options}, got {value!r:.200}")


def _fit_kind(value: Any, kind: str) -> tuple[bool, Any]:
    if kind == "integer":
        if isinstance(value, float) and value.is_integer():
            return True, int(value)
        return isinstance(value, int) and not isinstance(value, bool), value
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool), value
    types = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return kind not in types or isinstance(value, types[kind]), value

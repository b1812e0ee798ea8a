"""Schemas, argument types, and what the model gets back from a call."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajgrpo.errors import ConfigError
from ajgrpo.metrics import Metrics
from ajgrpo.rollout.calls import ToolCall
from ajgrpo.rollout.threads import UserThreads
from ajgrpo.rollout.tools import ToolSession, describe_tool, describe_tools, fit_arguments, result_text
from tests.rollout.agents import Counter, async_add, broken, leave, multiply


def respond(functions: list[Any], calls: list[ToolCall]) -> tuple[list[str], ToolSession, dict[str, float]]:
    async def main() -> tuple[list[str], ToolSession, dict[str, float]]:
        threads, metrics = UserThreads(2, "tools"), Metrics()
        session = ToolSession(describe_tools(functions), threads, metrics)
        messages = await session.respond(calls)
        threads.close()
        assert all(message["role"] == "tool" for message in messages)
        return [message["content"] for message in messages], session, metrics.reduce()

    return asyncio.run(main())


def choose(
    flag: bool, ratio: float, names: list[str], mode: Literal["fast", "slow"] = "fast", limit: int | None = None
) -> dict[str, Any]:
    """Chooses.

    Args:
        flag: A flag.
        ratio: A ratio.
        names: Some names.
        mode: How.
        limit: At most.
    """
    return {"flag": flag, "ratio": ratio, "names": names, "mode": mode, "limit": limit}


def test_the_schema_comes_from_hints_and_docstring() -> None:
    tool = describe_tool(multiply)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies two integers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first integer."},
                    "b": {"type": "integer", "description": "The second integer."},
                },
                "required": ["a", "b"],
            },
            "return": {"type": "integer"},
        },
    }
    assert not tool.is_async and describe_tool(async_add).is_async
    assert set(describe_tool(Counter().increment).properties) == {"step"}


def undocumented(a: int) -> int:
    return a


def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """Does.

    Args:
        a: A.
    """
    return 0


@pytest.mark.parametrize("function", [undocumented, unhinted, functools.partial(multiply, 1)])
def test_what_cannot_be_described_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"undocumented|unhinted|module-level function"):
        describe_tool(function)


def test_names_must_differ() -> None:
    with pytest.raises(ConfigError, match=r"got twice: \['multiply'\]"):
        describe_tools([multiply, async_add, multiply])


def test_calls_run_in_order_and_are_counted() -> None:
    calls = [
        ToolCall("multiply", {"a": 3, "b": 4}),
        ToolCall("async_add", {"a": 3, "b": 4}),
        ToolCall("broken", {"text": "luck"}),
        ToolCall("leave"),
        ToolCall("absent", {"x": 1}),
        ToolCall("", error="the tool call is not valid JSON"),
        ToolCall("multiply", {"a": 3}),
    ]
    contents, session, metrics = respond([multiply, async_add, broken, leave], calls)
    assert contents[:2] == ["12", "7"]
    assert [json.loads(content)["error"] for content in contents[2:]] == [
        "ValueError: bad luck",
        "SystemExit: 3",
        "there is no tool named 'absent'; available: multiply, async_add, broken, leave",
        "the tool call is not valid JSON",
        "multiply needs the argument 'b'",
    ]
    assert (session.call_count, session.failure_count) == (7, 5)
    assert metrics["tools/parallel_calls_mean"] == 7 and metrics["tools/unknown_name_count"] == 1
    assert metrics["tools/multiply/call_count"] == 2 and metrics["tools/multiply/failure_count"] == 1
    assert metrics["tools/async_add/failure_count"] == 0 and metrics["tools/latency_s"] >= 0


def test_arguments_are_given_the_types_of_the_schema() -> None:
    tool = describe_tool(choose)
    as_text = {"flag": "True", "ratio": "2", "names": '["a"]', "mode": "slow", "limit": "null"}
    assert fit_arguments(tool, as_text) == {"flag": True, "ratio": 2, "names": ["a"], "mode": "slow", "limit": None}
    assert fit_arguments(describe_tool(multiply), {"a": 3.0, "b": "4"}) == {"a": 3, "b": 4}
    # Numbers stay text where text is wanted.
    assert fit_arguments(describe_tool(broken), {"text": "7"}) == {"text": "7"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": "x", "b": 1}, "argument 'a' must be integer, got 'x'"),
        ({"a": True, "b": 1}, "argument 'a' must be integer, got True"),
        ({"a": 1.5, "b": 1}, "argument 'a' must be integer, got 1.5"),
        ({"a": 1, "b": None}, "argument 'b' must be integer, got None"),
        ({"a": 1, "b": 2, "self": 3}, "multiply has no argument 'self'; its arguments: 'a', 'b'"),
    ],
)
def test_arguments_of_another_type_are_told_to_the_model(arguments: dict[str, Any], message: str) -> None:
    (content,), session, _ = respond([multiply], [ToolCall("multiply", arguments)])
    assert json.loads(content) == {"error": message} and session.failure_count == 1


def test_an_enumeration_is_checked() -> None:
    arguments = {"flag": False, "ratio": 1.0, "names": [], "mode": "both"}
    (content,), _, _ = respond([choose], [ToolCall("choose", arguments)])
    assert json.loads(content)["error"] == "argument 'mode' must be one of ['fast', 'slow'], got 'both'"


class Odd:
    def __str__(self) -> str:
        return "odd \ud800"


def test_results_become_text() -> None:
    circular: list[Any] = []
    circular.append(circular)
    results = ["text", 7, None, {"a": [1]}, Odd(), circular, {1, 2} - {1}]
    assert [result_text(result) for result in results] == ["text", "7", "null", '{"a": [1]}', "odd ?", "[[...]]", "{2}"]
    assert result_text("x" * 1_000_001).endswith("x … (cut)")


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["multiply", "broken", "choose", "leave", "__import__", "eval"]) | st.text(min_size=1),
    arguments=st.dictionaries(
        st.sampled_from(["a", "b", "text", "flag", "self", "__class__"]) | st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4),
        max_size=4,
    ),
)
def test_any_call_gets_an_answer(name: str, arguments: dict[str, Any]) -> None:
    (content,), session, _ = respond([multiply, broken, choose, leave], [ToolCall(name, arguments)])
    content.encode()
    assert session.call_count == 1

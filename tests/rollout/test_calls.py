"""Tool calls out of text, the well-formed and the hostile."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ajgrpo.rollout.calls import FORMATS, MAX_CALLS, MAX_DEPTH, ParsedText, ToolCall, checked_call, detect_format

ADD = ToolCall("add", {"a": 3, "b": [1, None]})
ADD_JSON = '{"name": "add", "arguments": {"a": 3, "b": [1, null]}}'


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("json", "just text", "just text", []),
        ("json", block(ADD_JSON), "", [ADD]),
        ("json", "Wait.\n" + block(ADD_JSON) + block('{"name": "now"}'), "Wait.", [ADD, ToolCall("now")]),
        ("json", f"<tool_call>{ADD_JSON}", "", [ADD]),
        ("json", f"{block(ADD_JSON)}\nDone.", "Done.", [ADD]),
        ("json", block('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [ToolCall("f", {"a": 1})]),
        (
            "xml",
            block("<function=run>\n<parameter=code>\nprint(1)\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>"),
            "",
            [ToolCall("run", {"code": "print(1)\n", "n": "7"})],
        ),
        ("xml", block("<function=now>\n</function>"), "", [ToolCall("now")]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}<|eot_id|>', "", [ToolCall("f", {"a": 1})]),
        ("llama", '<|python_tag|>{"name": "f"}; {"name": "g"}', "", [ToolCall("f"), ToolCall("g")]),
        ("llama", 'The answer is {"name": "f"}', 'The answer is {"name": "f"}', []),
        ("mistral", f"[TOOL_CALLS] [{ADD_JSON}]</s>", "", [ADD]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [ToolCall("f", {"a": 1}), ToolCall("g")]),
        ("phi", f"<|tool_call|>[{ADD_JSON}, {ADD_JSON}]<|/tool_call|>", "", [ADD, ADD]),
    ],
)  # fmt: skip
def test_well_formed_calls(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    assert FORMATS[name].parse(text) == ParsedText(content, calls)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("json", block('{"name": "f", "arguments": {'), "not valid JSON"),
        ("json", block("[1]"), "must be a JSON object, got list"),
        ("json", block('{"arguments": {}}'), 'needs "name"'),
        ("json", block('{"name": 7}'), 'needs "name"'),
        ("json", block('{"name": "f", "arguments": [1]}'), "must be a JSON object, got list"),
        ("json", block('{"name": "f", "arguments": {"a": NaN}}'), "NaN is not allowed"),
        ("json", block('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}"), "not valid JSON"),
        ("json", block('{"name": "f", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}"), f"more than {MAX_DEPTH}"),
        ("json", block('{"name": "f", "arguments": ' + '{"a":' * 200_000), "nested too deeply"),
        ("xml", block("<function>f</function>"), "must hold <function=name>"),
        ("xml", block("<function=f><parameter=>1</parameter></function>"), "a parameter must be written"),
        ("llama", "<|python_tag|>import os; os.abort()", "not valid JSON"),
        ("llama", '{"name": "f", "parameters": {"a": 1}', "not valid JSON"),
        ("mistral", "[TOOL_CALLS] nothing", "not valid JSON"),
        ("phi", "<|tool_call|>f(1)", "not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_an_error(name: str, text: str, error: str) -> None:
    (call,) = FORMATS[name].parse(text).calls
    assert call.name == "" and call.error is not None and error in call.error


def test_calls_in_a_message_are_bounded() -> None:
    calls = FORMATS["json"].parse(block(ADD_JSON) * (MAX_CALLS + 9)).calls
    assert calls[:MAX_CALLS] == [ADD] * MAX_CALLS
    assert [call.error for call in calls[MAX_CALLS:]] == [f"more than {MAX_CALLS} tool calls in one message"]


def test_lone_surrogates_are_replaced() -> None:
    (call,) = FORMATS["json"].parse(block('{"name": "f", "arguments": {"\\ud800": "a\\udfff"}}')).calls
    assert call == ToolCall("f", {"?": "a?"})
    assert checked_call("f", {"a": "\ud800"}) == ToolCall("f", {"a": "?"})
    assert checked_call(None, {}).error is not None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=x>", "xml"),
        ("<tool_call>\n{{ call | tojson }}", "json"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "phi"),
        ("<|start_header_id|> <|python_tag|>", "llama"),
        ("<|start_header_id|> {'\"parameters\": '}", "llama"),
    ],
)
def test_the_format_follows_from_the_template(template: str, name: str) -> None:
    assert detect_format(template) is FORMATS[name]
    assert detect_format("{{ messages }}") is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
        "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", '{"name": ', '"f"',
        ', "arguments": ',
        "{", "}", "[", "]", ",", ";", ":", '"', "\\", "\n", "\x00", "\ufeff", "\ud800", "é", "１", "1e999", "-Infinity",
        "__import__('os').abort()", "{{ 7 * 7 }}", "<|im_end|>",
    ]
)  # fmt: skip
hostile = st.lists(fragments | st.text(max_size=8) | json_values.map(lambda value: json.dumps(value)), max_size=24).map(
    "".join
)


@settings(max_examples=400, deadline=None)
@given(text=hostile, name=st.sampled_from(sorted(FORMATS)))
def test_hostile_text_gives_calls_or_errors_and_never_raises(text: str, name: str) -> None:
    parsed = FORMATS[name].parse(text)
    for call in parsed.calls:
        assert (call.error is None) == bool(call.name)
        assert isinstance(call.arguments, dict)
        json.dumps(call.arguments).encode()
        call.name.encode()


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(st.text(), json_values, max_size=4))
def test_calls_of_any_arguments_come_back(arguments: dict[str, Any]) -> None:
    """What JSON and the bounds allow; NaN and infinities are refused, and lone surrogates replaced."""
    text = json.dumps({"name": "f", "arguments": arguments})
    assume("tool_call>" not in text)  # a marker ends the block wherever it stands, as it does for every reader of it
    (call,) = FORMATS["json"].parse(block(text)).calls
    if "NaN" in text or "Infinity" in text:
        assert call.error is not None or arguments == json.loads(text)["arguments"]
    else:
        assert call == ToolCall("f", arguments)

"""Tool calls read out of sampled text. Text is data here: it is taken apart, and never evaluated.

| format     | families                     | looks like                                                              |
|------------|------------------------------|-------------------------------------------------------------------------|
| ``json``   | Qwen2.5, Qwen3, Hermes, ours | ``<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>``          |
| ``xml``    | Qwen3.5, Qwen3-Coder         | ``<tool_call><function=f><parameter=a>1</parameter></function>…``        |
| ``llama``  | Llama 3                      | ``{"name": "f", "parameters": {"a": 1}}``, alone                         |
| ``mistral``| Mistral                      | ``[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]``                   |
| ``phi``    | Phi-4                        | ``<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>``    |

What looks like a call and cannot be read is a call with an ``error``, so that the model gets an answer that says so.

Left out: calls written as Python code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

MAX_CALLS = 64
"""Calls that are read from one message; the next one is answered with an error, any after it are ignored."""

MAX_DEPTH = 32
"""Deepest nesting of arguments: templates and tools walk them recursively."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it.

    Example: ``ToolCall("multiply", {"a": 3, "b": 4})``.

    Attributes:
        name: the function's name; empty when it could not be read.
        arguments: by name.
        error: why it cannot be run; None when it can.
    """

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class ParsedText:
    """A message taken apart: the text around the calls, and the calls in order."""

    content: str
    calls: list[ToolCall]


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a model family writes calls.

    Attributes:
        name: see the table above.
        parse: takes a message apart; never raises, whatever the text.
        special_tokens: whether markers of the format are special tokens, which plain decoding would drop.
    """

    name: str
    parse: Callable[[str], ParsedText]
    special_tokens: bool = False


class _CallError(Exception):
    """A call that cannot be read; the message is for the model."""


def parse_json_format(text: str) -> ParsedText:
    """``<tool_call>`` blocks with a JSON object."""
    return _parse_blocks(text, "<tool_call>", "</tool_call>", lambda body: [_call_of(_load(body))])


def parse_xml_format(text: str) -> ParsedText:
    """``<tool_call>`` blocks with ``<function=…>`` and ``<parameter=…>``; every argument is text."""
    return _parse_blocks(text, "<tool_call>", "</tool_call>", lambda body: [_read_function(body)])


def parse_phi_format(text: str) -> ParsedText:
    """``<|tool_call|>`` blocks with a JSON list."""
    return _parse_blocks(text, "<|tool_call|>", "<|/tool_call|>", _read_list)


def parse_llama_format(text: str) -> ParsedText:
    """A message that is nothing but JSON objects with a name, separated by ``;`` or white space."""
    body = text.strip()
    marked = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").removesuffix("<|eom_id|>").removesuffix("<|eot_id|>").strip()
    if not marked and not (body.startswith("{") and '"name"' in body[:200]):
        return ParsedText(text, [])
    return ParsedText("", _collect(lambda: list(_read_objects(body))))


def parse_mistral_format(text: str) -> ParsedText:
    """``[TOOL_CALLS]`` with a JSON list, or ``[TOOL_CALLS]name[ARGS]{…}``."""
    content, *bodies = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for body in bodies[: MAX_CALLS + 1]:
        name, arguments_follow, arguments = body.strip().removesuffix("</s>").partition("[ARGS]")
        if arguments_follow:
            wanted = {"name": name.partition("[CALL_ID]")[0].strip()}
            calls += _collect(lambda w=wanted, a=arguments: [_call_of({**w, "arguments": _load(a)})])  # type: ignore[misc]
        else:
            calls += _collect(lambda n=name: _read_list(n))  # type: ignore[misc]
    return ParsedText(content.strip() if calls else text, _limited(calls))


FORMATS = {
    "json": CallFormat("json", parse_json_format),
    "xml": CallFormat("xml", parse_xml_format),
    "llama": CallFormat("llama", parse_llama_format, special_tokens=True),
    "mistral": CallFormat("mistral", parse_mistral_format, special_tokens=True),
    "phi": CallFormat("phi", parse_phi_format, special_tokens=True),
}


def detect_format(template: str) -> CallFormat | None:
    """The format that a chat template teaches, by the markers that it prints; None when it shows none."""
    markers = {
        "xml": "<function=",
        "json": "<tool_call>",
        "mistral": "[TOOL_CALLS]",
        "phi": "<|tool_call|>",
        "llama": "<|python_tag|>",
    }
    for name, marker in markers.items():
        if marker in template:
            return FORMATS[name]
    return FORMATS["llama"] if "<|start_header_id|>" in template and '"parameters"' in template else None


def clean(value: Any) -> Any:
    """The value with lone surrogates replaced in all its texts: JSON can spell them, and tokenizers refuse them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list) else value


def checked_call(name: Any, arguments: Any) -> ToolCall:
    """The call, when its parts have the right types; else one with an error."""
    return _collect(lambda: [_call_of({"name": name, "arguments": arguments})])[0]


def _parse_blocks(text: str, opening: str, closing: str, read: Callable[[str], list[ToolCall]]) -> ParsedText:
    """Reads what stands between the markers. A block that is not closed goes to the end of the text."""
    first, marker, rest = text.partition(opening)
    if not marker:
        return ParsedText(text, [])
    # Templates put one line break between text and calls.
    pieces = [first.removesuffix("\n")]
    calls: list[ToolCall] = []
    while marker and len(calls) <= MAX_CALLS:
        body, _, rest = rest.partition(closing)
        calls += _collect(lambda body=body: read(body))  # type: ignore[misc]
        between, marker, rest = rest.partition(opening)
        if between.strip():
            pieces.append(between.strip("\n"))
    return ParsedText("\n".join(piece for piece in pieces if piece), _limited(calls))


def _limited(calls: list[ToolCall]) -> list[ToolCall]:
    if len(calls) <= MAX_CALLS:
        return calls
    return [*calls[:MAX_CALLS], ToolCall("", error=f"more than {MAX_CALLS} tool calls in one message")]


def _collect(read: Callable[[], list[ToolCall]]) -> list[ToolCall]:
    try:
        return read()
    except _CallError as exc:
        return [ToolCall("", error=str(exc))]


def _load(text: str) -> Any:
    """JSON without NaN and infinities, and not nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _CallError("the tool call is nested too deeply") from None
    except ValueError as exc:
        raise _CallError(f"the tool call is not valid JSON: {exc}") from None
    _check_depth(value)
    return clean(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for parent in level
            if isinstance(parent, dict | list)
            for item in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise _CallError(f"the tool call is nested more than {MAX_DEPTH} levels deep")


def _call_of(value: Any) -> ToolCall:
    """A call from ``{"name": …, "arguments" or "parameters": …}``."""
    if not isinstance(value, dict):
        raise _CallError(f"a tool call must be a JSON object, got {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _CallError('a tool call needs "name", the name of a tool')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _load(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _CallError(f'"arguments" must be a JSON object, got {type(arguments).__name__}')
    return ToolCall(clean(name), clean(arguments))


def _read_list(text: str) -> list[ToolCall]:
    value = _load(text.strip())
    return [_call_of(item) for item in (value if isinstance(value, list) else [value])[: MAX_CALLS + 1]]


def _read_objects(text: str) -> Iterator[ToolCall]:
    """JSON objects one after the other, with ``;``, ``,`` or white space between them."""
    decoder, index = json.JSONDecoder(parse_constant=_refuse_constant), 0
    for _ in range(MAX_CALLS + 1):
        index += len(text[index:]) - len(text[index:].lstrip("; \t\r\n,"))
        if index == len(text):
            return
        try:
            value, index = decoder.raw_decode(text, index)
        except RecursionError:
            raise _CallError("the tool call is nested too deeply") from None
        except ValueError as exc:
            raise _CallError(f"the tool call is not valid JSON: {exc}") from None
        _check_depth(value)
        yield _call_of(value)


def _read_function(text: str) -> ToolCall:
    """``<function=name>`` with its ``<parameter=key>value</parameter>``s. One line break at each end of a value is not
    part of it. A missing closing tag ends with the next opening one."""
    _, found, rest = text.partition("<function=")
    name, closed, body = rest.partition(">")
    name = name.strip()
    if not found or not closed or not name:
        raise _CallError("a tool call must hold <function=name>…</function>")
    arguments: dict[str, Any] = {}
    for piece in body.partition("</function>")[0].split("<parameter=")[1:]:
        key, closed, value = piece.partition(">")
        if not closed or not key.strip():
            raise _CallError("a parameter must be written <parameter=name>value</parameter>")
        value = value.partition("</parameter>")[0]
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return ToolCall(clean(name), clean(arguments))

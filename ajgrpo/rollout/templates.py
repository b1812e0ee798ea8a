"""Which chat template renders, and whether it keeps what stands already.

A conversation grows: turn n's prompt ids and sampled ids should be the beginning of turn n + 1's prompt ids, so that a
rollout is one training sequence. Many templates break that: they drop earlier reasoning, or put an empty ``<think>``
block before an answer and not into the history. Nothing is lost then, but every such turn *forks* (``reconcile``) and
costs its whole prefix again. ``check_template`` finds out by rendering a probe. With tools on, families that break it
get one of the templates below, written for training: same markers, same system texts, nothing removed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from ajgrpo.errors import ConfigError
from ajgrpo.rollout.calls import FORMATS, CallFormat, detect_format
from ajgrpo.rollout.chat import ChatFormat
from ajgrpo.types import Message

log = logging.getLogger(__name__)

JSON_TOOLS = """\
{%- macro tool_text(tools) %}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{%- endmacro %}
{%- macro text_of(message) %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}{%- for part in message.content %}{{ part.text }}{%- endfor %}
{%- endif %}{%- endmacro %}
{%- macro calls_of(message) %}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{%- endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\\n{"name": ' }}{{ call.name | tojson }}{{ ', "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{%- endmacro %}
"""

CHATML = (
    JSON_TOOLS
    + """\
{%- set default_system = DEFAULT_SYSTEM %}
{%- if messages[0].role == 'system' %}{%- set system = text_of(messages[0]) %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = default_system %}{%- set rest = messages %}{%- endif %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}{{ system + '\\n\\n' if system else '' }}{{ tool_text(tools) }}{{ '<|im_end|>\\n' }}
{%- elif system %}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + text_of(message) + '\\n</tool_response>' }}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + ANSWER_PREFIX }}{{ text_of(message) }}{{ calls_of(message) }}{{ '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + text_of(message) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ANSWER_PREFIX }}{%- endif %}"""
)
"""Markers of ChatML. ``ANSWER_PREFIX`` stands before every assistant message, in the history as in the prompt."""

QWEN3_THINK = "('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '')"
QWEN25_SYSTEM = "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'"

LLAMA3 = """\
{%- macro text_of(message) %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}{%- for part in message.content %}{{ part.text }}{%- endfor %}
{%- endif %}{%- endmacro %}
{%- if messages[0].role == 'system' %}{%- set system = text_of(messages[0]) %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- if system or tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}
{{- 'You have access to the following functions. To call a function, respond with JSON only, in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}. Do not use variables.\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- endif %}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + text_of(message) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + text_of(message) }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}
{{- '; ' if not loop.first else '' }}{{ '{"name": ' }}{{ call.name | tojson }}{{ ', "parameters": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}' }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA3 = (
    JSON_TOOLS
    + """\
{%- if messages[0].role == 'system' %}{%- set system = text_of(messages[0]) %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- if tools %}{%- set system = (system + '\\n\\n' if system else '') + tool_text(tools) %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{%- if loop.first and system %}{{ system + '\\n\\n' }}{%- endif %}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' + text_of(message) + '\\n</tool_response>' }}
{%- else %}{{ text_of(message) }}{{ calls_of(message) }}{%- endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""
)

QWEN35 = """\
{%- macro text_of(message) %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}{%- for part in message.content %}{{ part.text }}{%- endfor %}
{%- endif %}{%- endmacro %}
{%- if messages[0].role == 'system' %}{%- set system = text_of(messages[0]) %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nIf you choose to call a function ONLY reply in the following format with NO suffix:\\n\\n' }}
{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n' }}
{{- '</function>\\n</tool_call>' }}{{ '\\n\\n' + system if system else '' }}{{ '<|im_end|>\\n' }}
{%- elif system %}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set silent = enable_thinking is defined and enable_thinking is false %}
{%- set prefix = '<think>\\n\\n</think>\\n\\n' if silent else '<think>\\n' %}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + text_of(message) + '\\n</tool_response>' }}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + prefix }}{{ text_of(message) }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}
{{- ('\\n' if not loop.first or message.content else '') + '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments.items() %}
{{- '<parameter=' + name + '>\\n' }}{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + text_of(message) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + prefix }}{%- endif %}"""


def _chatml(default_system: str = "''", answer_prefix: str = "''") -> str:
    return CHATML.replace("DEFAULT_SYSTEM", default_system).replace("ANSWER_PREFIX", answer_prefix)


QWEN3 = _chatml(answer_prefix=QWEN3_THINK)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family's training template.

    Attributes:
        name: for messages.
        markers: texts that all stand in the family's own templates.
        template: rendered instead.
        call_format: how the model is told to write calls.
    """

    name: str
    markers: tuple[str, ...]
    template: str
    call_format: CallFormat


FAMILIES = (
    Family("Qwen3.5", ("<|im_start|>", "<tool_call>", "<function="), QWEN35, FORMATS["xml"]),
    Family("Qwen3", ("<|im_start|>", "<tool_call>", "enable_thinking"), QWEN3, FORMATS["json"]),
    Family("Qwen2.5", ("<|im_start|>", "<tool_call>", "You are Qwen"), _chatml(QWEN25_SYSTEM), FORMATS["json"]),
    Family("ChatML", ("<|im_start|>",), _chatml(), FORMATS["json"]),
    Family("Llama 3", ("<|start_header_id|>",), LLAMA3, FORMATS["llama"]),
    Family("Gemma", ("<start_of_turn>",), GEMMA3, FORMATS["json"]),
)  # fmt: skip
"""The first family whose markers are all there is taken."""


@dataclasses.dataclass(frozen=True)
class TemplateCheck:
    """What a template does with a growing conversation.

    Attributes:
        shows_tools: whether the prompt says which tools there are.
        keeps_tool_turns: whether a tool turn's prompt begins with the turn before it.
        keeps_user_turns: the same for a further user message, without tools.
        problem: the first difference, for a message; empty without one.
    """

    shows_tools: bool
    keeps_tool_turns: bool
    keeps_user_turns: bool
    problem: str = ""


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}}},
    },
}
_QUESTION: Message = {"role": "user", "content": "What is 3 + 4?"}
_CALL: Message = {
    "role": "assistant",
    "content": "<think>\nI add.\n</think>\n\nLet me see.",
    "tool_calls": [{"type": "function", "function": {"name": "probe", "arguments": {"x": 3}}}],
}
_RESULT: Message = {"role": "tool", "name": "probe", "content": "7"}
_ANSWER: Message = {"role": "assistant", "content": "<think>\nI add.\n</think>\n\nSeven."}


def check_template(chat: ChatFormat) -> TemplateCheck:
    """Renders probes and compares; see ``TemplateCheck``. A template that cannot render one does not keep it."""
    tools = [_PROBE_TOOL]
    question = _render(chat, [_QUESTION], tools)
    problems = [
        _growth_problem(chat, [_QUESTION], _CALL, _RESULT, tools),
        _growth_problem(chat, [_QUESTION, _CALL, _RESULT], _CALL, _RESULT, tools),
        _growth_problem(chat, [_QUESTION], _ANSWER, _QUESTION, []),
    ]
    return TemplateCheck(
        shows_tools=question is not None and question != _render(chat, [_QUESTION], []),
        keeps_tool_turns=not (problems[0] or problems[1]),
        keeps_user_turns=not problems[2],
        problem=next((problem for problem in problems if problem), ""),
    )


def _growth_problem(
    chat: ChatFormat, before: list[Message], answer: Message, after: Message, tools: Sequence[Mapping[str, Any]]
) -> str:
    """How the prompt after ``answer`` and ``after`` fails to begin with the prompt before and the answer; or empty."""
    prompt = _render(chat, before, tools)
    answered = _render(chat, [*before, answer], tools, add_generation_prompt=False)
    grown = _render(chat, [*before, answer, after], tools)
    if prompt is None or answered is None or grown is None:
        return f"it cannot render a conversation with a {after['role']} message"
    if answered[: len(prompt)] != prompt:
        return "the beginning of an answer in the prompt differs from that in the history"
    if grown[: len(answered)] != answered:
        return f"an answer is rendered differently once a {after['role']} message follows"
    return ""


def _render(
    chat: ChatFormat, messages: list[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> list[int] | None:
    try:
        return chat.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except (jinja2.TemplateError, TypeError, KeyError, ValueError):  # what templates raise for roles they do not know
        return None


def choose_format(tokenizer: Any, template_kwargs: Mapping[str, Any] | None, *, with_tools: bool) -> ChatFormat:
    """The chat format of a run.

    Without tools it is the tokenizer's own template. With tools it is too, if that shows the tools and keeps what
    stands; else the family's training template; else its own with a warning about the forks to expect.

    Raises:
        ConfigError: no chat template; or with tools, one of an unknown family that does not show them, or whose calls
            could not be read.
    """
    own = ChatFormat(tokenizer, template_kwargs)
    if not with_tools:
        return own
    template = str(tokenizer.chat_template)
    check = check_template(own)
    call_format = detect_format(template)
    readable = call_format is not None or getattr(tokenizer, "response_template", None) is not None
    if check.shows_tools and readable:
        own = ChatFormat(tokenizer, template_kwargs, call_format=call_format)
        if check.keeps_tool_turns:
            return own
    for family in FAMILIES:
        if all(marker in template for marker in family.markers):
            log.info("tools are rendered with the %s training template (%s)", family.name, check.problem)
            return ChatFormat(tokenizer, template_kwargs, template=family.template, call_format=family.call_format)
    if not check.shows_tools:
        raise ConfigError(
            "the chat template does not show tools to the model, and its family is not known; set chat_template of "
            "processing_class to one that renders `tools`"
        )
    if not readable:
        raise ConfigError(
            "how the model writes tool calls is not known: its chat template shows none of the known formats; give "
            "processing_class a response_template"
        )
    log.warning(
        "the chat template does not keep earlier turns (%s): every turn after a tool call starts a new training sample "
        "that repeats the conversation so far; see rollout/fork_frac",
        check.problem,
    )
    return own

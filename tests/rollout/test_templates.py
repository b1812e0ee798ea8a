"""Which template renders, and whether it keeps what stands."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from ajgrpo.errors import ConfigError
from ajgrpo.rollout.chat import ChatFormat
from ajgrpo.rollout.reconcile import reconcile
from ajgrpo.rollout.templates import FAMILIES, check_template, choose_format
from ajgrpo.rollout.tools import describe_tool
from ajgrpo.types import Message, TurnRecord
from tests.rollout.agents import byte_tokenizer, call, multiply

TOOLS = [describe_tool(multiply).schema]
DROPS_THINKING = (
    "{%- if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{%- else %}{{ m.content }}{% endif %}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer(template: str) -> Any:
    changed = copy.deepcopy(byte_tokenizer())
    changed.chat_template = template
    return changed


def text(chat: ChatFormat, messages: list[Message], tools: list[Any] | None = None) -> str:
    return str(byte_tokenizer().decode(chat.render(messages, tools or ())))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_training_templates_show_tools_and_keep_every_turn(family: Any, kwargs: dict[str, Any]) -> None:
    chat = ChatFormat(byte_tokenizer(), kwargs, template=family.template, call_format=family.call_format)
    check = check_template(chat)
    assert (check.shows_tools, check.keeps_tool_turns, check.keeps_user_turns, check.problem) == (True, True, True, "")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("content", ["", "Let me see."])
def test_a_rendered_call_is_read_back_and_makes_one_sequence(family: Any, content: str) -> None:
    """Model output in the family's own words: rendering the parsed message gives the sampled tokens again."""
    if family.name == "Llama 3":
        content = ""  # a Llama message is either text or calls
    chat = ChatFormat(byte_tokenizer(), template=family.template, call_format=family.call_format)
    question: Message = {"role": "user", "content": "3 times 4?"}
    function = {"name": "multiply", "arguments": {"a": 3, "b": 4}}
    answer: Message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }
    prompt = chat.render([question], TOOLS)
    answered = chat.render([question, answer], TOOLS, add_generation_prompt=False)
    end = {"Llama 3": "<|eot_id|>", "Gemma": "<end_of_turn>\n"}.get(family.name, "<|im_end|>\n")
    ids = answered[len(prompt) : len(answered) - len(byte_tokenizer().encode(end))]
    parsed = chat.parse(ids, TOOLS, prompt)
    assert [read.name for read in parsed.calls] == ["multiply"]
    assert {key: int(value) for key, value in parsed.calls[0].arguments.items()} == {"a": 3, "b": 4}
    assert parsed.message["content"] == content
    second = chat.render([question, parsed.message, {"role": "tool", "name": "multiply", "content": "12"}], TOOLS)
    turns = [TurnRecord(prompt, ids, [-1.0] * len(ids)), TurnRecord(second, [5], [-1.0])]
    assert len(reconcile(turns).sequences) == 1
    assert byte_tokenizer().decode(second).count("12") >= 1


def test_a_template_that_drops_reasoning_is_found_out() -> None:
    check = check_template(ChatFormat(tokenizer(DROPS_THINKING)))
    assert check.shows_tools and not check.keeps_tool_turns and not check.keeps_user_turns
    assert check.problem == "an answer is rendered differently once a tool message follows"


def test_an_answer_that_begins_in_the_prompt_only_is_found_out() -> None:
    template = DROPS_THINKING.replace("assistant\n' }}{% endif", "assistant\n<think></think>' }}{% endif")
    assert "the beginning of an answer" in check_template(ChatFormat(tokenizer(template))).problem


def test_without_tools_the_tokenizers_own_template_is_used() -> None:
    chat = choose_format(tokenizer(DROPS_THINKING), None, with_tools=False)
    assert text(chat, [{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_known_family_that_breaks_turns_gets_its_training_template() -> None:
    chat = choose_format(tokenizer(DROPS_THINKING), None, with_tools=True)
    assert check_template(chat).keeps_tool_turns
    prompt = text(chat, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], TOOLS)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"name": "multiply"' in prompt
    ids = byte_tokenizer().encode(call("multiply", a=1, b=2))
    assert chat.parse(ids, TOOLS).calls[0].arguments == {"a": 1, "b": 2}
    assert chat.parse(ids).calls == [], "without tools nothing is a call"


def test_a_template_that_keeps_turns_stays() -> None:
    own = FAMILIES[3].template.replace("# Tools", "# My tools")
    chat = choose_format(tokenizer(own), None, with_tools=True)
    assert "# My tools" in text(chat, [{"role": "user", "content": "hi"}], TOOLS)


def test_an_unknown_family_that_breaks_turns_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    unknown = DROPS_THINKING.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    with caplog.at_level(logging.WARNING):
        chat = choose_format(tokenizer(unknown), None, with_tools=True)
    assert "every turn after a tool call starts a new training sample" in caplog.text
    assert text(chat, [{"role": "user", "content": "hi"}], TOOLS).startswith('[{"')


def test_an_unknown_family_without_tools_is_refused() -> None:
    blind = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not show tools"):
        choose_format(tokenizer(blind), None, with_tools=True)
    with pytest.raises(ConfigError, match="how the model writes tool calls is not known"):
        choose_format(tokenizer("{{ tools }}" + blind), None, with_tools=True)

"""Messages to token ids and back, by the tokenizer's chat template.

    messages, tools ──render──▶ prompt ids ──(server)──▶ output ids ──parse──▶ message, tool calls

Calls are read by the tokenizer's own response template where it has one, else by the format of its family
(``rollout.calls``). Which template renders is decided once, in ``rollout.templates``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ajgrpo.errors import ConfigError
from ajgrpo.rollout.calls import CallFormat, ToolCall, checked_call, clean
from ajgrpo.types import Message

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """What the model said: the message as it stands in the conversation, and the calls to run."""

    message: Message
    calls: list[ToolCall] = dataclasses.field(default_factory=list)


class ChatFormat:
    """One tokenizer's chat format.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        template_kwargs: further keyword arguments of the template (``chat_template_kwargs``).
        template: used instead of the tokenizer's own template.
        call_format: how the model writes tool calls; None: by the tokenizer's response template, or none are read.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        template: str | None = None,
        call_format: CallFormat | None = None,
    ):
        if tokenizer.chat_template is None and template is None:
            raise ConfigError(
                f"the tokenizer ({type(tokenizer).__name__}) has no chat template, and prompts are messages: use an "
                "instruction-tuned model, or pass processing_class with chat_template set"
            )
        self._tokenizer, self._call_format = tokenizer, call_format
        self._template_kwargs = dict(template_kwargs or {})
        if template is not None:
            self._template_kwargs["chat_template"] = template
        self._responses = getattr(tokenizer, "response_template", None)
        self.unreadable_count = 0

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the conversation, up to where the assistant's next message begins.

        Args:
            messages: the conversation.
            tools: JSON schemas of the tools on offer.
            add_generation_prompt: whether the beginning of the assistant's next message is included.
        """
        kwargs = {**self._template_kwargs, "tools": list(tools)} if tools else self._template_kwargs
        token_ids = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False, **kwargs
        )
        return [int(token) for token in token_ids]

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """The assistant's message that was sampled as ``token_ids``; special tokens are left out of its text.

        Args:
            token_ids: the sampled ids.
            tools: JSON schemas of the tools on offer; without any, nothing is read as a call.
            prompt_ids: what they were sampled after.
        """
        if tools and self._responses is not None:
            return self._parse_response(token_ids, tools, prompt_ids)
        text = self._decode(token_ids)
        if not tools or self._call_format is None:
            return ParsedTurn({"role": "assistant", "content": text})
        marked = self._decode(token_ids, special_tokens=True) if self._call_format.special_tokens else text
        parsed = self._call_format.parse(marked)
        if not parsed.calls:
            return ParsedTurn({"role": "assistant", "content": text})
        return ParsedTurn(_message(parsed.content, parsed.calls, text), parsed.calls)

    def _decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        return str(clean(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)))

    def _parse_response(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]
    ) -> ParsedTurn:
        text = self._decode(token_ids)
        try:
            message = self._tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids), tools=list(tools))
            wanted = message.get("tool_calls") or []
            functions = [call.get("function", call) for call in wanted]
            calls = [checked_call(function.get("name"), function.get("arguments")) for function in functions]
        except Exception as exc:  # foreign code on text that may be anything: the model is told, and the run goes on
            log.debug("the response template could not read a message", exc_info=exc)
            self.unreadable_count += 1
            problem = f"the message could not be read: {type(exc).__name__}: {exc}"[:500]
            return ParsedTurn({"role": "assistant", "content": text}, [ToolCall("", error=problem)])
        if not calls:
            return ParsedTurn({"role": "assistant", "content": text})
        parsed = _message(str(message.get("content") or ""), calls, text)
        kept = {key: value for key, value in message.items() if key not in ("content", "tool_calls", "role")}
        return ParsedTurn(parsed if "tool_calls" not in parsed else {**parsed, **clean(kept)}, calls)


def _message(content: str, calls: Sequence[ToolCall], text: str) -> Message:
    """The message with its calls. With an unreadable one among them it stays plain text, as it was sampled: no template
    could render that call again."""
    if any(call.error is not None for call in calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }

"""Messages to token ids and back, by the tokenizer's chat template.

Left out: tool calls (schemas in the prompt, calls parsed out of a completion), training templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ajgrpo.errors import ConfigError
from ajgrpo.types import Message


class ChatFormat:
    """One tokenizer's chat format.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        template_kwargs: further keyword arguments of the template (``chat_template_kwargs``).

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer ({type(tokenizer).__name__}) has no chat template, and prompts are messages: use an "
                "instruction-tuned model, or pass processing_class with chat_template set"
            )
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, up to where the assistant's next message begins."""
        token_ids = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **self._template_kwargs
        )
        return [int(token) for token in token_ids]

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant's message that was sampled as ``token_ids``; special tokens are left out of its text."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return {"role": "assistant", "content": text}

"""Rendering and parsing with a tokenizer's chat template."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ajgrpo.errors import ConfigError
from ajgrpo.rollout.chat import ChatFormat
from tests.rollout.fakes import EOS, CharTokenizer, encode

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' ' + message.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{{ mood }}{% endif %}"
)


def word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<end>", "user", "assistant", "hello", "you", "gladly"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = template
    return fast


def test_render_and_parse_with_a_real_tokenizer() -> None:
    chat = ChatFormat(word_tokenizer(TEMPLATE), {"mood": " gladly"})
    assert chat.render([{"role": "user", "content": "hello you"}]) == [2, 4, 5, 1, 3, 6]
    assert chat.parse([4, 5, 1]).message == {"role": "assistant", "content": "hello you"}


def test_render_passes_the_template_arguments() -> None:
    chat = ChatFormat(CharTokenizer(), {"suffix": "!"})
    assert chat.render([{"role": "user", "content": "hi"}]) == encode("user:hi;!assistant:")
    assert chat.parse([*encode(" yes\n"), EOS]).message == {"role": "assistant", "content": " yes\n"}


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"PreTrainedTokenizerFast|TokenizersBackend.*has no chat template"):
        ChatFormat(word_tokenizer(None))

"""The tokenizer of a model directory, and what training asks of it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ajgrpo.errors import CheckpointError


def read_tokenizer(directory: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as exc:
        raise CheckpointError(f"cannot load a tokenizer from {directory}: {exc}; pass processing_class") from exc


def require_chat_template(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Prompts are rendered with the chat template.

    Raises:
        CheckpointError: there is none.
    """
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"the tokenizer of {directory} has no chat template, which prompts are rendered with; pass a "
            "processing_class that has one (an instruction-tuned model's)"
        )


def load_tokenizer(directory: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """A tokenizer that prompts can be rendered with.

    Raises:
        CheckpointError: there is none, or it has no chat template.
    """
    tokenizer = read_tokenizer(directory, trust_remote_code)
    require_chat_template(tokenizer, directory)
    return tokenizer

"""Loading the dataset of prompts, and checking that it can be trained on before anything expensive starts.

A row is one prompt: column ``prompt`` holds a list of messages; every other column goes to the reward functions.
Left out: tokenisation and chat templates (``rollout.chat``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import datasets

from ajgrpo.errors import DatasetError
from ajgrpo.imports import import_object, is_dotted_name
from ajgrpo.rollout.prompts import RESERVED_COLUMNS

PromptDataset: TypeAlias = "datasets.Dataset | datasets.IterableDataset"

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
CHECKED_ROWS = 1000
"""Rows of a dataset that are looked at; one that fails later fails when its prompt is rendered."""
CHECKED_STREAMED_ROWS = 8
"""The same for a streaming dataset, where each row may cost a download."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


def load_train_dataset(
    source: str, *, split: str = "train", name: str | None = None, kwargs: Mapping[str, Any] | None = None
) -> PromptDataset:
    """Loads the dataset that a configuration names.

    Args:
        source: a file (.jsonl, .json, .parquet, .csv), a directory (of such files, or written by ``save_to_disk``),
            ``module.function`` that returns a dataset, or a dataset's id on the hub.
        split: which split of a directory or hub dataset.
        name: the hub dataset's configuration.
        kwargs: keyword arguments of the function, or of ``datasets.load_dataset``.

    Raises:
        DatasetError: when it cannot be found or read.
        ConfigError: when ``module.function`` cannot be imported.
    """
    options = dict(kwargs or {})
    path = Path(source)
    if path.is_file():
        return _load_file(path, options)
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _pick_split(datasets.load_from_disk(source), split, source)
        return _load_dataset(source, split=split, **options)
    if is_dotted_name(source):
        return _pick_split(import_object(source, "dataset")(**options), split, source)
    return _load_dataset(source, name, split=split, **options)


def _load_file(path: Path, options: dict[str, Any]) -> PromptDataset:
    if path.suffix not in FILE_FORMATS:
        raise DatasetError(f"dataset file {str(path)!r} must end in one of {', '.join(FILE_FORMATS)}")
    # A single file always holds the split "train".
    return _load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), split="train", **options)


def _load_dataset(*args: Any, **options: Any) -> PromptDataset:
    try:
        return datasets.load_dataset(*args, **options)
    # OSError: missing or unreachable; ValueError: unknown split or configuration; the others: unreadable content.
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
        datasets.exceptions.DatasetGenerationError,
    ) as error:
        source = options.get("data_files", args[0])
        raise DatasetError(
            f"dataset {source!r} is neither a readable file or directory, nor module.function, nor a dataset id that "
            f"the hub answers: {error.__cause__ or error}"
        ) from error


def _pick_split(loaded: Any, split: str, source: str) -> Any:
    if not isinstance(loaded, datasets.DatasetDict | datasets.IterableDatasetDict):
        return loaded
    if split not in loaded:
        raise DatasetError(f"dataset {source!r} has no split {split!r}; its splits are {', '.join(loaded)}")
    return loaded[split]


def check_dataset(dataset: Any, *, require_prompt: bool = True) -> None:
    """Checks that ``dataset`` holds conversational prompts, from its first rows.

    Args:
        dataset: what the trainer was given as ``train_dataset``.
        require_prompt: False when an environment's ``reset()`` gives the prompts.

    Raises:
        DatasetError: naming the row, its value and what is expected.
    """
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = ", ".join(dataset)
        raise DatasetError(f"train_dataset holds several splits ({splits}); pass one, for example dataset['train']")
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise DatasetError(
            "train_dataset must be a datasets.Dataset or datasets.IterableDataset, got "
            f"{'nothing' if dataset is None else type(dataset).__name__}"
        )
    limit = CHECKED_ROWS if isinstance(dataset, datasets.Dataset) else CHECKED_STREAMED_ROWS
    number = -1
    for number, row in enumerate(itertools.islice(dataset, limit)):
        if clash := sorted(RESERVED_COLUMNS & set(row)):
            raise DatasetError(
                f"train_dataset has columns named {', '.join(clash)}, which reward functions get from the rollouts; "
                f"rename them: dataset.rename_column({clash[0]!r}, 'reference')"
            )
        if "prompt" in row:
            check_prompt(row["prompt"], number)
        elif require_prompt:
            raise DatasetError(
                f"train_dataset has no column 'prompt'; its columns are {', '.join(row)}. Rename the one that holds "
                "the messages: dataset.rename_column(old, 'prompt')"
            )
    if number < 0:
        raise DatasetError("train_dataset is empty")


def check_prompt(prompt: Any, row: int) -> None:
    """Checks that a prompt is a list of messages, naming ``row`` otherwise.

    Raises:
        DatasetError: with the value and what is expected.
    """
    expected = "a non-empty list of messages such as [{'role': 'user', 'content': '3 + 4?'}]"
    if isinstance(prompt, str):
        raise DatasetError(
            f"row {row}: 'prompt' is text, {_short(prompt)}, but must be {expected}. Convert it: dataset.map(lambda "
            "row: {'prompt': [{'role': 'user', 'content': row['prompt']}]})"
        )
    if not isinstance(prompt, list) or not prompt:
        raise DatasetError(f"row {row}: 'prompt' must be {expected}, got {_short(prompt)}")
    for message in prompt:
        if problem := _message_problem(message):
            raise DatasetError(f"row {row}: 'prompt' must be {expected}, but {problem}: {_short(message)}")


def _message_problem(message: Any) -> str | None:
    """What is wrong with a message, or None."""
    if not isinstance(message, dict):
        return "a message is not a dict"
    if message.get("role") not in _ROLES:
        return f"a message's role is not one of {', '.join(_ROLES)}"
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("type") if isinstance(part, dict) else None for part in content]
        return None if all(part == "text" for part in parts) else "a message holds something other than text"
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    return "a message's content is not text"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"

"""The stream of prompts: which row comes when, and the check that some rows are usable at all.

A prompt's index counts the prompts over all epochs; it is what a resumed run continues from.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from ajgrpo.errors import DatasetError
from ajgrpo.types import Message

RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids"})
"""Keyword arguments of reward functions that the loop fills itself."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row of the dataset, due for a group.

    Attributes:
        index: position in the stream of prompts over all epochs.
        row_index: row of the dataset.
        epoch: full passes over the dataset before this prompt.
        row: the row's columns.
    """

    index: int
    row_index: int
    epoch: int
    row: dict[str, Any]

    @property
    def messages(self) -> list[Message]:
        """The column ``prompt``, every message a fresh dict; empty where the environment gives the prompt."""
        return [dict(message) for message in self.row.get("prompt") or []]

    @property
    def columns(self) -> dict[str, Any]:
        """The other columns."""
        return {name: value for name, value in self.row.items() if name != "prompt"}


def read_prompts(
    dataset: Any,
    *,
    seed: int,
    start_index: int = 0,
    num_epochs: float | None = None,
    from_environment: bool = False,
) -> Iterator[Prompt]:
    """Yields prompts over all epochs.

    With ``from_environment`` a row may lack the column ``prompt``, and without a dataset there are endless empty rows.

    A dataset with a length is read in a new order each epoch, ``np.random.default_rng([seed, epoch]).permutation``,
    from ``start_index`` to ``ceil(num_epochs · length)``. Any other is read in its own order, always from its first
    row and in whole passes; its prompts are numbered from ``start_index``.

    Raises:
        DatasetError: no dataset, an empty one, or a row that is not conversational.
    """
    if dataset is None and from_environment:
        yield from (Prompt(index, index, 0, {}) for index in itertools.count(start_index))
    elif dataset is None:
        raise DatasetError("the rollout worker needs a dataset with a column 'prompt', got None")
    elif isinstance(dataset, Sized):
        yield from _read_shuffled(dataset, seed, start_index, num_epochs, from_environment)
    else:
        yield from _read_in_order(dataset, start_index, num_epochs, from_environment)


def _read_shuffled(
    dataset: Any, seed: int, start_index: int, num_epochs: float | None, from_environment: bool
) -> Iterator[Prompt]:
    size = len(dataset)
    if size == 0:
        raise DatasetError("the dataset has no rows")
    end = math.inf if num_epochs is None else math.ceil(num_epochs * size)
    index, order, order_epoch = start_index, np.empty(0, np.int64), -1
    while index < end:
        epoch, offset = divmod(index, size)
        if epoch != order_epoch:
            order, order_epoch = np.random.default_rng([seed, epoch]).permutation(size), epoch
        row_index = int(order[offset])
        yield Prompt(index, row_index, epoch, checked_row(dataset[row_index], row_index, from_environment))
        index += 1


def _read_in_order(
    dataset: Any, start_index: int, num_epochs: float | None, from_environment: bool
) -> Iterator[Prompt]:
    index, epoch = start_index, 0
    while num_epochs is None or epoch < math.ceil(num_epochs):
        first = index
        for row_index, row in enumerate(dataset):
            yield Prompt(index, row_index, epoch, checked_row(row, row_index, from_environment))
            index += 1
        if index == first:
            raise DatasetError(f"the streaming dataset gave no rows in epoch {epoch}")
        epoch += 1


def checked_row(row: Any, row_index: int, from_environment: bool = False) -> dict[str, Any]:
    """The row itself, when its ``prompt`` is a list of messages and no column has a reserved name."""
    prompt = row.get("prompt")
    if prompt is None and from_environment:
        prompt = [{}]
    conversational = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
    if not conversational:
        raise DatasetError(
            f"row {row_index}: column 'prompt' must be a list of messages such as "
            f"[{{'role': 'user', 'content': '3 + 4?'}}], got {prompt!r:.200}"
        )
    if clash := sorted(RESERVED_COLUMNS & set(row)):
        raise DatasetError(f"row {row_index}: the column names {clash} are reserved for reward functions; rename them")
    return dict(row)


class EpochGuard:
    """Raises when a whole epoch yielded no group, since then no sample would ever come.

    Args:
        size: rows of the dataset; None when unknown (streaming), where an epoch is whole once the next one begins.
    """

    def __init__(self, size: int | None):
        self._size = size
        self._opened: Counter[int] = Counter()
        self._skipped: dict[int, Counter[str]] = {}
        self._latest_epoch = -1

    def open(self, prompt: Prompt) -> None:
        """The prompt is next in the stream."""
        self._opened[prompt.epoch] += 1
        previous, self._latest_epoch = self._latest_epoch, prompt.epoch
        if self._size is None and 0 <= previous < prompt.epoch:
            self._check(previous)

    def skip(self, prompt: Prompt, reason: str) -> None:
        """The prompt yields no group, for a reason such as ``"rejected by filter_prompt"``.

        Raises:
            DatasetError: so did every other prompt of its epoch.
        """
        self._skipped.setdefault(prompt.epoch, Counter())[reason] += 1
        self._check(prompt.epoch)

    def _check(self, epoch: int) -> None:
        whole = self._opened[epoch] == self._size if self._size is not None else epoch < self._latest_epoch
        reasons = self._skipped.get(epoch, Counter())
        if whole and reasons.total() == self._opened[epoch]:
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            raise DatasetError(
                f"none of the {self._opened[epoch]} prompts of epoch {epoch} can be trained on: {listed}; "
                "loosen filter_prompt, shorten the prompts or raise the server's --max-model-len"
            )

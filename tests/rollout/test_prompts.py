"""Order of prompts over epochs, checks of rows, and the guard against epochs without use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from ajgrpo.errors import DatasetError
from ajgrpo.rollout.prompts import EpochGuard, Prompt, read_prompts
from tests.rollout.fakes import question

ROWS = [question(index) for index in range(5)]


class Stream:
    """A dataset without length that can be read again and again."""

    def __init__(self, rows: list[dict[str, Any]]):
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


def test_each_epoch_has_its_own_order_from_the_seed() -> None:
    prompts = list(read_prompts(ROWS, seed=3, num_epochs=2.0))
    expected = [*np.random.default_rng([3, 0]).permutation(5), *np.random.default_rng([3, 1]).permutation(5)]
    assert [prompt.row_index for prompt in prompts] == expected
    assert expected[:5] != expected[5:]
    assert [prompt.index for prompt in prompts] == list(range(10))
    assert [prompt.epoch for prompt in prompts] == [0] * 5 + [1] * 5
    assert all(prompt.row == ROWS[prompt.row_index] for prompt in prompts)


def test_a_resumed_run_goes_on_where_it_was() -> None:
    whole = list(read_prompts(ROWS, seed=3, num_epochs=3.0))
    assert list(read_prompts(ROWS, seed=3, start_index=7, num_epochs=3.0)) == whole[7:]
    assert list(islice(read_prompts(ROWS, seed=3, start_index=7), 8)) == whole[7:]


def test_a_part_of_an_epoch_is_rounded_up() -> None:
    assert len(list(read_prompts(ROWS, seed=0, num_epochs=0.5))) == 3
    assert len(list(read_prompts(ROWS, seed=0, num_epochs=1.01))) == 6


def test_a_stream_keeps_its_order_and_restarts_from_its_first_row() -> None:
    prompts = list(islice(read_prompts(Stream(ROWS[:3]), seed=0, start_index=4), 5))
    assert [(prompt.index, prompt.row_index, prompt.epoch) for prompt in prompts] == [
        (4, 0, 0),
        (5, 1, 0),
        (6, 2, 0),
        (7, 0, 1),
        (8, 1, 1),
    ]
    assert len(list(read_prompts(Stream(ROWS[:3]), seed=0, num_epochs=1.5))) == 6


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "got None"),
        ([], "no rows"),
        (Stream([]), "no rows in epoch 0"),
        ([{"prompt": "3 + 4?"}], r"row 0: column 'prompt' must be a list of messages .* got '3 \+ 4\?'"),
        ([{"prompt": []}], "must be a list of messages"),
        ([{"answer": "7"}], "got None"),
        ([{"prompt": [{"role": "user", "content": "?"}], "completions": 1}], r"\['completions'\] are reserved"),
    ],
)
def test_unusable_datasets_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        list(read_prompts(dataset, seed=0, num_epochs=1))


def test_messages_of_a_prompt_are_copies() -> None:
    prompt = next(read_prompts(ROWS, seed=0))
    prompt.messages[0]["content"] = "changed"
    assert prompt.messages[0]["content"] == f"q{prompt.row_index}"
    assert prompt.columns == {"answer": f"a{prompt.row_index}"}


def prompt(index: int, epoch: int) -> Prompt:
    return Prompt(index, index, epoch, question(index))


def test_guard_raises_when_a_whole_epoch_was_skipped() -> None:
    guard = EpochGuard(2)
    guard.open(prompt(0, 0))
    guard.skip(prompt(0, 0), "rejected")
    guard.open(prompt(1, 0))
    guard.open(prompt(2, 1))  # prompt 1 turned out usable
    guard.skip(prompt(2, 1), "rejected")
    guard.open(prompt(3, 1))
    guard.open(prompt(4, 2))
    with pytest.raises(DatasetError, match="none of the 2 prompts of epoch 1 can be trained on: 1 rejected, 1 long"):
        guard.skip(prompt(3, 1), "long")  # known late, after the next epoch has begun


def test_guard_does_not_judge_an_epoch_that_a_resumed_run_began_in_the_middle() -> None:
    guard = EpochGuard(3)
    for index in (1, 2):
        guard.open(prompt(index, 0))
        guard.skip(prompt(index, 0), "rejected")


def test_guard_of_a_stream_judges_when_the_next_epoch_begins() -> None:
    guard = EpochGuard(None)
    for index in range(2):
        guard.open(prompt(index, 0))
        guard.skip(prompt(index, 0), "rejected")
    with pytest.raises(DatasetError, match="2 prompts of epoch 0"):
        guard.open(prompt(2, 1))

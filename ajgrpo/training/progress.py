"""Which prompts are done: the count behind the epoch, and the place from which a resumed run goes on.

A prompt is done when its group has been announced as complete (``GroupDone``) and each of its samples has been trained
or dropped. Prompts are numbered in the order in which they are started, over all epochs, but finish in any order.
Invariant: every prompt below ``first_unfinished`` is done.
"""

from __future__ import annotations

from collections import Counter


class PromptLedger:
    """Counts samples in and out for each prompt.

    Args:
        start: index of the first prompt of this run; all before it count as done.
    """

    def __init__(self, start: int = 0):
        self._first_unfinished = start
        self._announced: dict[int, int] = {}
        self._resolved: Counter[int] = Counter()
        self._done: set[int] = set()
        self._num_announced = start

    @property
    def first_unfinished(self) -> int:
        """Index of the first prompt that is not done."""
        return self._first_unfinished

    @property
    def num_done(self) -> int:
        """How many prompts are done."""
        return self._first_unfinished + len(self._done)

    @property
    def num_announced(self) -> int:
        """How many prompts' groups are complete, so that no further sample of theirs will come."""
        return self._num_announced

    def announce(self, prompt_index: int, num_samples: int) -> None:
        """The prompt's group is complete and has ``num_samples`` samples (0: dropped)."""
        self._announced[prompt_index] = num_samples
        self._num_announced += 1
        self._settle(prompt_index)

    def resolve(self, prompt_index: int) -> None:
        """One of the prompt's samples has been trained or dropped."""
        self._resolved[prompt_index] += 1
        self._settle(prompt_index)

    def _settle(self, prompt_index: int) -> None:
        if self._announced.get(prompt_index) != self._resolved[prompt_index]:
            return
        del self._announced[prompt_index], self._resolved[prompt_index]
        self._done.add(prompt_index)
        while self._first_unfinished in self._done:
            self._done.remove(self._first_unfinished)
            self._first_unfinished += 1

"""The ledger of prompts, against a plain statement of what is done."""

from __future__ import annotations

import numpy as np

from ajgrpo.training.progress import PromptLedger


def test_prompts_finish_in_any_order() -> None:
    ledger = PromptLedger()
    ledger.announce(1, 0)
    assert (ledger.num_done, ledger.first_unfinished) == (1, 0)
    ledger.resolve(0)
    ledger.announce(0, 2)
    assert (ledger.num_done, ledger.first_unfinished, ledger.num_announced) == (1, 0, 2)
    ledger.resolve(0)
    assert (ledger.num_done, ledger.first_unfinished) == (2, 2)


def test_a_resumed_run_counts_the_prompts_before_it() -> None:
    ledger = PromptLedger(start=5)
    assert (ledger.num_done, ledger.first_unfinished, ledger.num_announced) == (5, 5, 5)
    ledger.announce(5, 0)
    assert (ledger.num_done, ledger.first_unfinished) == (6, 6)


def test_random_orders_equal_a_plain_statement() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 4, 8)
        events = [("announce", i) for i in range(8)] + [("resolve", i) for i, n in enumerate(sizes) for _ in range(n)]
        ledger, seen = PromptLedger(), []
        for position in rng.permutation(len(events)):
            kind, prompt = events[position]
            if kind == "announce":
                ledger.announce(prompt, int(sizes[prompt]))
            else:
                ledger.resolve(prompt)
            seen.append((kind, prompt))
            done = {i for i in range(8) if ("announce", i) in seen and seen.count(("resolve", i)) == sizes[i]}
            assert ledger.num_done == len(done)
            assert ledger.first_unfinished == next(i for i in range(9) if i not in done)

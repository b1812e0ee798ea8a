"""Arithmetic prompts: the dataset of the quickstart and of the other example runs.

A task that needs no download, whose answers are exact, and which a small model can learn in minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply}


def arithmetic_rows(
    num_prompts: int,
    *,
    min_operand: int = 0,
    max_operand: int = 99,
    operation: str = "+",
    template: str = "{a}{op}{b}=",
    system_prompt: str | None = None,
    num_examples: int = 0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows with ``prompt`` (messages) and ``answer`` (the result in decimal digits).

    Args:
        num_prompts: how many rows.
        min_operand: smallest operand.
        max_operand: largest operand, inclusive.
        operation: ``+``, ``-`` or ``*``.
        template: user message with the fields ``{a}``, ``{op}`` and ``{b}``.
        system_prompt: an optional system message.
        num_examples: solved exercises, each a user and an assistant message, before the one to solve.
        seed: operands are drawn uniformly from ``numpy.random.default_rng(seed)``.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
    operands = np.random.default_rng(seed).integers(min_operand, max_operand + 1, (num_prompts, num_examples + 1, 2))
    results = OPERATIONS[operation](operands[..., 0], operands[..., 1])
    rows = []
    for pairs, answers in zip(operands.tolist(), results.tolist(), strict=True):
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for (a, b), answer in zip(pairs, answers, strict=True):
            messages.append({"role": "user", "content": template.format(a=a, b=b, op=operation)})
            messages.append({"role": "assistant", "content": str(answer)})
        rows.append({"prompt": messages[:-1], "answer": messages[-1]["content"]})
    return rows


def make_dataset(num_prompts: int = 4096, **kwargs: Any) -> Dataset:
    """The rows of ``arithmetic_rows`` as a ``datasets.Dataset``; for ``dataset: ajgrpo.arithmetic.make_dataset``."""
    from datasets import Dataset

    return Dataset.from_list(arithmetic_rows(num_prompts, **kwargs))

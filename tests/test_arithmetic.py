"""The generated arithmetic dataset: answers, messages and repeatability."""

import numpy as np
import pytest

from ajgrpo.arithmetic import OPERATIONS, arithmetic_rows


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_answers_solve_the_last_message(operation):
    rows = arithmetic_rows(50, min_operand=2, max_operand=13, operation=operation, template="{a} {op} {b}", seed=3)
    assert len(rows) == 50
    for row in rows:
        (message,) = row["prompt"]
        a, op, b = message["content"].split()
        assert message["role"] == "user" and op == operation
        assert 2 <= int(a) <= 13 and 2 <= int(b) <= 13
        expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        assert row["answer"] == str(expected)


def test_operands_are_the_seeded_draws_in_order():
    operands = np.random.default_rng(7).integers(0, 10, (5, 2))
    contents = [row["prompt"][0]["content"] for row in arithmetic_rows(5, min_operand=0, max_operand=9, seed=7)]
    assert contents == [f"{a}+{b}=" for a, b in operands]


def test_solved_examples_come_between_the_system_prompt_and_the_question():
    rows = arithmetic_rows(20, template="{a} {op} {b}", system_prompt="Be brief.", num_examples=2, seed=1)
    for row in rows:
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        contents = [message["content"] for message in row["prompt"]]
        assert contents[0] == "Be brief."
        for question, answer in [*zip(contents[1:5:2], contents[2:5:2], strict=True), (contents[5], row["answer"])]:
            a, _, b = question.split()
            assert int(answer) == int(a) + int(b)


def test_an_unknown_operation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"operation must be one of \+, -, \*, got '/'"):
        arithmetic_rows(1, operation="/")

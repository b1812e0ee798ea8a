"""Turns to sequences, sequences to samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajgrpo.rollout.reconcile import make_sample, most_likely, reconcile
from ajgrpo.types import TrainingSequence, TurnRecord


def turn(prompt_ids: list[int], output_ids: list[int], **fields: Any) -> TurnRecord:
    """A turn whose tokens have log-prob -token / 16 and version token."""
    defaults: dict[str, Any] = {
        "output_log_probs": [-token / 16 for token in output_ids],
        "output_versions": list(output_ids),
    }
    return TurnRecord(prompt_ids, output_ids, **defaults | fields)


def test_a_single_turn_is_one_sequence() -> None:
    result = reconcile([turn([5, 6], [7, 2])])
    assert result.sequences == [
        TrainingSequence([5, 6, 7, 2], trained_positions=[2, 3], old_log_probs=[-7 / 16, -2 / 16], versions=[7, 2])
    ]
    assert (result.num_transitions, result.fork_drifts) == (0, [])


def test_a_turn_that_starts_with_the_held_tokens_extends_the_sequence() -> None:
    result = reconcile([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 50, 51], [5])])
    (sequence,) = result.sequences
    assert sequence.input_ids == [1, 2, 3, 4, 50, 51, 5]
    assert sequence.trained_positions == [2, 3, 6]
    assert sequence.old_log_probs == [-3 / 16, -4 / 16, -5 / 16]
    assert sequence.versions == [3, 4, 5]
    assert (result.num_transitions, result.fork_drifts) == (1, [])


def test_a_rewritten_conversation_forks() -> None:
    """The drawing in the module's docstring: turn 3 no longer has turn 1's answer as it was sampled."""
    result = reconcile([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 50], [5]), turn([1, 2, 3, 60, 50, 5, 51], [6, 7])])
    first, second = result.sequences
    assert first.input_ids == [1, 2, 3, 4, 50, 5] and first.trained_positions == [2, 3, 5]
    assert second.input_ids == [1, 2, 3, 60, 50, 5, 51, 6, 7] and second.trained_positions == [7, 8]
    assert (result.num_transitions, result.fork_drifts) == (2, [3])


def test_the_same_prompt_again_forks() -> None:
    result = reconcile([turn([1, 2], [3]), turn([1, 2], [4])])
    assert [sequence.input_ids for sequence in result.sequences] == [[1, 2, 3], [1, 2, 4]]
    assert result.fork_drifts == [1]


def test_masked_tokens_are_context() -> None:
    result = reconcile([turn([1], [2, 3, 4], output_mask=[0, 1, 0]), turn([1, 2, 3, 4], [5, 6], output_mask=[1, 0])])
    (sequence,) = result.sequences
    assert sequence.input_ids == [1, 2, 3, 4, 5], "what follows the last trained token is not forwarded"
    assert sequence.trained_positions == [2, 4] and sequence.versions == [3, 5]


def test_a_rollout_without_trained_tokens_has_no_sequence() -> None:
    assert reconcile([turn([1], [2], output_mask=[0], output_log_probs=[])]).sequences == []
    assert reconcile([turn([1], [])]).sequences == []
    assert reconcile([]).sequences == []


def test_extras_follow_their_tokens() -> None:
    first = turn([1], [2, 3], output_mask=[0, 1], output_sampler_logprobs=[{2: -1.0}, {3: -2.0}])
    first.output_sampling_mask = [[2, 9], [3, 8]]
    second = turn([1, 2, 3], [4], output_sampling_mask=[[4]])
    (sequence,) = reconcile([first, second]).sequences
    assert sequence.sampler_logprobs == [{3: -2.0}, {}]
    assert sequence.sampling_mask == [[3, 8], [4]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (turn([1], [2, 3], output_log_probs=[-1.0]), "turn 0: output_log_probs has 1 entries for 2 output tokens"),
        (turn([1], [2], output_log_probs=[]), "output_log_probs has 0 entries for 1"),
        (turn([1], [2], output_mask=[1, 1]), "output_mask has 2 entries for 1"),
        (turn([1], [2], output_sampling_mask=[]), "output_sampling_mask has 0 entries for 1"),
        (turn([1], [2], output_sampler_logprobs=[{}, {}]), "output_sampler_logprobs has 2"),
        (turn([1], [2], output_versions=[1, 2]), "output_versions has 2"),
        (turn([], [2]), "its prompt is empty"),
    ],
)
def test_inconsistent_turns_are_refused(bad: TurnRecord, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reconcile([bad])


def test_candidate_sets_for_some_turns_only_are_refused() -> None:
    with pytest.raises(ValueError, match="for all turns of a sequence or for none"):
        reconcile([turn([1], [2], output_sampling_mask=[[2]]), turn([1, 2], [3])])


@settings(deadline=None)  # a busy machine is no failure
@given(st.data())
def test_each_generated_token_is_trained_once_after_the_tokens_it_was_sampled_after(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(1, 3), max_size=3)
    turns: list[TurnRecord] = []
    history = [1]
    for serial in range(data.draw(st.integers(1, 5))):
        output = data.draw(tokens)
        versions = [10 * serial + index for index in range(len(output))]
        turns.append(turn(list(history), output, output_versions=versions))
        history += output
        if data.draw(st.booleans()):  # the template rewrites something
            history[data.draw(st.integers(0, len(history) - 1))] = data.draw(st.integers(1, 3))
        history += data.draw(tokens)
    result = reconcile(turns)
    trained = {
        version: sequence.input_ids[: position + 1]
        for sequence in result.sequences
        for position, version in zip(sequence.trained_positions, sequence.versions, strict=True)
    }
    expected = {
        version: record.prompt_ids + record.output_ids[: index + 1]
        for record in turns
        for index, version in enumerate(record.output_versions or [])
    }
    assert trained == expected
    assert sum(len(sequence.versions) for sequence in result.sequences) == len(expected)
    assert result.num_transitions == len(turns) - 1


STAMPS: dict[str, Any] = {
    "advantage": 0.5,
    "group_id": 1,
    "row_index": 2,
    "prompt_index": 3,
    "model_version": 4,
    "rollout_id": "r",
    "queued_at": 5.0,
}


def test_a_sample_holds_the_sequence_as_padded_arrays() -> None:
    sequence = TrainingSequence(
        input_ids=[5, 6, 7, 2],
        trained_positions=[2, 3],
        old_log_probs=[-0.25, -0.5],
        versions=[0, -1],
        sampler_logprobs=[{7: -0.25, 9: -0.125, 8: -3.0, 1: -4.0}, {2: -0.5, 3: -math.inf}],
        sampling_mask=[[7, 9], [2, 3, 4]],
    )
    sample = make_sample(sequence, num_sampler_logprobs=3, **STAMPS)
    np.testing.assert_array_equal(sample.input_ids, np.array([5, 6, 7, 2], np.int32))
    np.testing.assert_array_equal(sample.trained_positions, np.array([2, 3], np.int32))
    np.testing.assert_array_equal(sample.old_log_probs, np.array([-0.25, -0.5], np.float32))
    np.testing.assert_array_equal(sample.versions, np.array([0, -1], np.int32))
    np.testing.assert_array_equal(sample.sampler_ids, np.array([[9, 7, 8], [2, -1, -1]], np.int32))
    np.testing.assert_array_equal(
        sample.sampler_log_probs, np.array([[-0.125, -0.25, -3.0], [-0.5, -np.inf, -np.inf]], np.float32)
    )
    np.testing.assert_array_equal(sample.candidate_ids, np.array([[7, 9, -1], [2, 3, 4]], np.int32))
    arrays = ["input_ids", "trained_positions", "versions", "sampler_ids", "candidate_ids"]
    assert all(getattr(sample, name).dtype == np.int32 for name in arrays)
    assert sample.old_log_probs.dtype == sample.sampler_log_probs.dtype == np.float32
    assert {name: getattr(sample, name) for name in STAMPS} == STAMPS


def test_a_sample_without_extras() -> None:
    sequence = TrainingSequence([5, 7], trained_positions=[1], old_log_probs=[-0.25], versions=[0])
    sample = make_sample(sequence, num_sampler_logprobs=2, **STAMPS)
    assert sample.candidate_ids is None
    assert sample.sampler_ids.tolist() == [[-1, -1]] and np.isneginf(sample.sampler_log_probs).all()
    assert make_sample(sequence, num_sampler_logprobs=0, **STAMPS).sampler_ids.shape == (1, 0)


def test_most_likely_leaves_out_a_sampled_token_outside_the_top() -> None:
    assert list(most_likely({7: -9.0, 1: -0.5, 2: -1.0}, 2).items()) == [(1, -0.5), (2, -1.0)]

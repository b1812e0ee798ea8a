"""The trie against independent statements of what a prefix tree is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajgrpo.packing.trie import PrefixTrie, TreeLayout
from tests.helpers import random_samples

SEEDS = range(20)

# A tiny vocabulary makes forks, duplicates and prefixes the rule.
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=10)
# A shared machine may stall at any example.
repeatable = settings(deadline=None, derandomize=True, database=None)


def build(samples: list[list[int]]) -> PrefixTrie:
    trie = PrefixTrie()
    for tokens in samples:
        trie.add(np.array(tokens, np.int32))
    return trie


def node_path(tokens: list[int], sample: int) -> list[tuple]:
    """The identities of a sample's nodes: all up to the token, and the next token; the last is the sample's own."""
    inner = [(tuple(tokens[: i + 1]), tokens[i + 1]) for i in range(len(tokens) - 1)]
    return [*inner, ("leaf of", sample)]


def interval_mask(layout: TreeLayout) -> np.ndarray:
    q, k = np.indices((len(layout.tokens), len(layout.tokens)))
    return (k <= q) & (q < layout.subtree_end[k])


def path_mask(layout: TreeLayout) -> np.ndarray:
    """By brute force: a token sees what comes before it on its samples' paths, and itself."""
    mask = np.zeros((len(layout.tokens), len(layout.tokens)), bool)
    for path in layout.paths:
        for depth, query in enumerate(path):
            mask[query, path[: depth + 1]] = True
    return mask


def random_sequences(seed: int) -> list[list[int]]:
    return [sample.input_ids.tolist() for sample in random_samples(np.random.default_rng(seed), vocab_size=8)]


def assert_is_prefix_tree(samples: list[list[int]]) -> None:
    layout = build(samples).layout()
    # One row position for each node, and one node for each position.
    position_of: dict[tuple, int] = {}
    for i, tokens in enumerate(samples):
        path = layout.paths[i].tolist()
        assert layout.tokens[path].tolist() == tokens
        assert layout.positions[path].tolist() == list(range(len(tokens)))
        for node, position in zip(node_path(tokens, i), path, strict=True):
            assert position_of.setdefault(node, position) == position
    assert sorted(position_of.values()) == list(range(len(layout.tokens)))
    np.testing.assert_array_equal(interval_mask(layout), path_mask(layout))


def test_drawing() -> None:
    layout = build([[5, 6, 7, 8], [5, 6, 9], [5, 6]]).layout()
    assert layout.tokens.tolist() == [5, 6, 6, 7, 8, 6, 9]
    assert layout.positions.tolist() == [0, 1, 1, 2, 3, 1, 2]
    assert layout.subtree_end.tolist() == [7, 2, 5, 5, 5, 7, 7]
    assert [path.tolist() for path in layout.paths] == [[0, 2, 3, 4], [0, 5, 6], [0, 1]]
    drawing = ["x......", "xx.....", "x.x....", "x.xx...", "x.xxx..", "x....x.", "x....xx"]
    mask = interval_mask(layout)
    assert ["".join("x" if visible else "." for visible in row) for row in mask] == drawing


def test_layout_types() -> None:
    layout = build([[5, 6], [5, 7]]).layout()
    arrays = [layout.tokens, layout.positions, layout.subtree_end, *layout.paths]
    assert [array.dtype for array in arrays] == [np.dtype(np.int32)] * 5


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sets_are_prefix_trees(seed: int) -> None:
    assert_is_prefix_tree(random_sequences(seed))


@repeatable
@given(sequences)
def test_any_set_is_a_prefix_tree(samples: list[list[int]]) -> None:
    assert_is_prefix_tree(samples)


@repeatable
@given(sequences)
def test_unique_tokens_are_prefixes_with_next_token(samples: list[list[int]]) -> None:
    trie = build(samples)
    nodes = {node for i, tokens in enumerate(samples) for node in node_path(tokens, i)}
    assert trie.num_tokens == len(nodes) == len(trie.layout().tokens)


@repeatable
@given(sequences)
def test_measure_foretells_add_and_changes_nothing(samples: list[list[int]]) -> None:
    trie = PrefixTrie()
    for tokens in (np.array(sample) for sample in samples):
        before = (len(trie), trie.num_tokens, trie.visible_pairs)
        growth = trie.measure(tokens)
        assert (len(trie), trie.num_tokens, trie.visible_pairs) == before
        assert trie.add(tokens) == growth
        assert (trie.num_tokens, trie.visible_pairs) == (before[1] + growth.tokens, before[2] + growth.visible_pairs)
    assert trie.visible_pairs == interval_mask(trie.layout()).sum()


@repeatable
@given(sequences, st.randoms(use_true_random=False))
def test_row_does_not_depend_on_order_of_adding(samples: list[list[int]], order_rng: random.Random) -> None:
    order = list(range(len(samples)))
    order_rng.shuffle(order)
    first, second = build(samples).layout(), build([samples[i] for i in order]).layout()
    for name in ("tokens", "positions", "subtree_end"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    for place, i in enumerate(order):
        assert first.tokens[first.paths[i]].tolist() == second.tokens[second.paths[place]].tolist()


@repeatable
@given(sequences)
def test_unary_chains_are_contiguous(samples: list[list[int]]) -> None:
    layout = build(samples).layout()
    children: dict[int, set[int]] = {}
    for path in layout.paths:
        for parent, child in zip(path[:-1].tolist(), path[1:].tolist(), strict=True):
            children.setdefault(parent, set()).add(child)
    for parent, below in children.items():
        assert min(below) == parent + 1


def test_duplicates_share_all_but_their_leaf() -> None:
    layout = build([[4, 5, 6]] * 3).layout()
    assert layout.tokens.tolist() == [4, 5, 6, 6, 6]
    assert [path.tolist() for path in layout.paths] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert layout.subtree_end.tolist() == [5, 5, 3, 4, 5]


def test_fork_is_one_token_before_the_difference() -> None:
    layout = build([[4, 5, 6, 1], [4, 5, 7, 1]]).layout()
    assert layout.tokens.tolist() == [4, 5, 6, 1, 5, 7, 1]


def test_first_tokens_that_differ_in_the_next_token_share_nothing() -> None:
    assert build([[4, 5], [4, 6]]).layout().positions.tolist() == [0, 1, 0, 1]


def test_nothing_shared_is_plain_packing() -> None:
    samples = [[1, 9, 9], [2, 9], [3, 9, 9, 9]]
    layout = build(samples).layout()
    assert layout.tokens.tolist() == [1, 9, 9, 2, 9, 3, 9, 9, 9]
    assert layout.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert layout.subtree_end.tolist() == [3, 3, 3, 5, 5, 9, 9, 9, 9]


@pytest.mark.parametrize("large", [255, 256, 65_535, 65_536, 151_935, 2**31 - 1])
def test_token_ids_of_any_size_keep_their_order_and_value(large: int) -> None:
    layout = build([[large, 1, 7], [1, large], [large, 1, 8], [large - 1, large]]).layout()
    assert layout.tokens.tolist() == [1, large, large - 1, large, large, 1, 7, 1, 8]


def test_empty() -> None:
    trie = PrefixTrie()
    layout = trie.layout()
    assert (len(trie), trie.num_tokens, trie.visible_pairs) == (0, 0, 0)
    assert (layout.tokens.tolist(), layout.subtree_end.tolist(), layout.paths) == ([], [], [])
    with pytest.raises(ValueError, match="at least one token"):
        trie.measure(np.array([], np.int32))

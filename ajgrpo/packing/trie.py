"""The prefix trie of one row: which tokens are shared, and where each one lies in the row.

A position predicts one token, so a node is keyed on its token *and* the next one: the trie forks one token before two
samples diverge. A sample's last token predicts nothing and is a leaf of its own, even in an exact duplicate.

    samples        trie                    row, depth-first
    A: 5 6 7 8     5 ─┬─ 6            C    index         0  1  2  3  4  5  6
    B: 5 6 9          ├─ 6 ── 7 ── 8  A    tokens        5  6  6  7  8  6  9
    C: 5 6            └─ 6 ── 9       B    positions     0  1  1  2  3  1  2
                                           subtree_end   7  2  5  5  5  7  7

The trie is kept as the sorted list of its samples. In lexicographic order the samples below any node are neighbours,
so the most that a sample shares with all the others is what it shares with the one before or the one after it.
Measuring or adding a sample is a binary search and two vectorised comparisons, and the depth-first row is the
concatenation of what each sample does not share with its predecessor.

Left out: sharing anywhere but at the start of the samples.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

import numpy as np

_TOKEN_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Growth:
    """What a sample adds to a trie.

    Attributes:
        tokens: nodes that the trie does not hold yet, at least 1 (the sample's own leaf).
        visible_pairs: (query, key) pairs with one of those nodes as the query; a node at depth d sees d + 1 keys.
    """

    tokens: int
    visible_pairs: int


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """A trie as a depth-first row of N tokens; the module's drawing shows one.

    Attributes:
        tokens: int32 [N].
        positions: int32 [N], depth of each node, 0 for a first token.
        subtree_end: int32 [N]; key k is visible to query q when ``k <= q < subtree_end[k]``.
        paths: for each sample, in the order of adding, int32 [T]: where in the row each of its tokens lies.
    """

    tokens: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray
    paths: list[np.ndarray]


class PrefixTrie:
    """Token sequences with their common prefixes held once."""

    def __init__(self) -> None:
        # Big-endian bytes compare like the token sequences they encode, at the speed of memcmp.
        self._samples: list[tuple[bytes, int]] = []
        self.num_tokens = 0
        self.visible_pairs = 0

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._samples)

    def measure(self, tokens: np.ndarray) -> Growth:
        """What adding ``tokens`` (int [T], T ≥ 1) would add; changes nothing."""
        growth, _ = self._measure(_encode(tokens))
        return growth

    def add(self, tokens: np.ndarray) -> Growth:
        """Adds a sample of ``tokens`` (int [T], T ≥ 1)."""
        key = _encode(tokens)
        growth, place = self._measure(key)
        self._samples.insert(place, (key, len(self._samples)))
        self.num_tokens += growth.tokens
        self.visible_pairs += growth.visible_pairs
        return growth

    def depth_first(self) -> list[int]:
        """The samples (numbered in the order of adding) in the order of their leaves in the row."""
        return [sample for _, sample in self._samples]

    def layout(self) -> TreeLayout:
        """The depth-first row: samples in lexicographic order, duplicates in the order of adding."""
        keys = [key for key, _ in self._samples]
        shared = [0, *(_shared_nodes(before, key) for before, key in itertools.pairwise(keys))][: len(keys)]
        sequences = [_decode(key) for key in keys]
        own = [len(sequence) - depth for sequence, depth in zip(sequences, shared, strict=True)]
        starts = np.cumsum([0, *own]).tolist()
        paths, subtree_end = _walk(sequences, shared, starts)
        by_adding = sorted(range(len(keys)), key=lambda leaf: self._samples[leaf][1])
        empty = np.zeros(0, np.int32)
        return TreeLayout(
            tokens=np.concatenate([empty, *(s[depth:] for s, depth in zip(sequences, shared, strict=True))]),
            positions=np.concatenate(
                [
                    empty,
                    *(np.arange(depth, len(s), dtype=np.int32) for s, depth in zip(sequences, shared, strict=True)),
                ]
            ),
            subtree_end=subtree_end,
            paths=[paths[leaf] for leaf in by_adding],
        )

    def _measure(self, key: bytes) -> tuple[Growth, int]:
        """The growth that ``key`` would bring and its place in the sorted list, after its duplicates."""
        place = bisect.bisect(self._samples, (key, len(self._samples)))
        neighbours = self._samples[max(place - 1, 0) : place + 1]
        shared = max((_shared_nodes(other, key) for other, _ in neighbours), default=0)
        length = len(key) // _TOKEN_BYTES
        return Growth(length - shared, _triangle(length) - _triangle(shared)), place


def _walk(sequences: list[np.ndarray], shared: list[int], starts: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """The path of each sample, in the order of the row, and ``subtree_end`` of the row.

    ``starts[i]`` is where the part that sample i does not share with its predecessor begins (``starts[-1]``: the end).
    """
    max_length = max((len(sequence) for sequence in sequences), default=0)
    paths = []
    node_at_depth = np.zeros(max_length, np.int32)
    for sequence, depth, start, end in zip(sequences, shared, starts, starts[1:], strict=False):
        node_at_depth[depth : len(sequence)] = np.arange(start, end)
        paths.append(node_at_depth[: len(sequence)].copy())
    # Going backwards: a node's subtree ends where the next sample that does not share the node begins.
    subtree_end = np.zeros(starts[-1], np.int32)
    end_at_depth = np.full(max_length, starts[-1], np.int32)
    for i in reversed(range(len(sequences))):
        subtree_end[starts[i] : starts[i + 1]] = end_at_depth[shared[i] : len(sequences[i])]
        end_at_depth[shared[i] :] = starts[i]
    return paths, subtree_end


def _encode(tokens: np.ndarray) -> bytes:
    if len(tokens) == 0:
        raise ValueError("a sample must hold at least one token, got none")
    return np.asarray(tokens).astype(">u4").tobytes()


def _decode(key: bytes) -> np.ndarray:
    return np.frombuffer(key, ">u4").astype(np.int32)


def _shared_nodes(a: bytes, b: bytes) -> int:
    """How many nodes two samples share: one less than their common tokens, since the next token is part of a node."""
    length = min(len(a), len(b)) // _TOKEN_BYTES
    differs = np.frombuffer(a, np.uint32, length) != np.frombuffer(b, np.uint32, length)
    common = int(differs.argmax()) if differs.any() else length
    return max(common - 1, 0)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2

"""Samples to rows: prefix trie, planner and fixed-shape batches. NumPy only."""

from ajgrpo.packing.batch import TreeBatch, batch_metrics, bucket_sizes, build_batch, choose_bucket
from ajgrpo.packing.planner import MicroBatchPlanner, Placement, Row
from ajgrpo.packing.trie import PrefixTrie, TreeLayout

__all__ = [
    "MicroBatchPlanner",
    "Placement",
    "PrefixTrie",
    "Row",
    "TreeBatch",
    "TreeLayout",
    "batch_metrics",
    "bucket_sizes",
    "build_batch",
    "choose_bucket",
]

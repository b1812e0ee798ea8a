"""How much arithmetic a train step needs, and how much a device could do: model FLOPs utilisation (MFU).

The count is that of Chowdhery et al. 2022 (PaLM, appendix B), with attention counted pair by pair: 6 operations for
each weight of a matrix and token (2 forward, 4 backward), 12 for each visible (query, key) pair and element of a head.
The head's matrix is needed once for each loss term. What gradient checkpointing computes twice counts once.
"""

from __future__ import annotations

import math
import re

import jax
import numpy as np

from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import abstract_params, param_logical_axes
from ajgrpo.packing.batch import TreeBatch
from ajgrpo.training.optimizer import is_matrix

PEAK_FLOPS = {
    r"B200": 2250e12,
    r"GH200|H200": 989e12,
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"H100": 989e12,
    r"A100": 312e12,
    r"A10\b": 125e12,
    r"L40S": 362e12,
    r"L4\b": 121e12,
}
"""Dense bfloat16 and float16 operations a second by device kind, from NVIDIA's data sheets; the first match counts."""


def peak_flops(device_kind: str, compute_dtype: str) -> float | None:
    """Operations a second of one device in the compute dtype; None where they are not known (float32 included)."""
    if compute_dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for pattern, peak in PEAK_FLOPS.items() if re.search(pattern, device_kind)), None)


class FlopsCounter:
    """Counts the operations that micro-batches need, forward and backward.

    Args:
        config: the model.
    """

    def __init__(self, config: ModelConfig):
        self._config = config
        self._layer_weights = _weights_per_token(config)

    def count(self, batch: TreeBatch) -> float:
        """Operations for the real tokens and terms of a micro-batch."""
        config = self._config
        weights = self._layer_weights * int(batch.num_tokens.sum())
        weights += config.vocab_size * config.hidden_size * int(batch.num_terms.sum())
        pairs = 0
        for positions, length in zip(batch.positions, batch.num_tokens, strict=True):
            visible = positions[:length].astype(np.int64) + 1
            windows = config.layer_windows or (0,) * config.num_layers
            pairs += sum(int((np.minimum(visible, window) if window else visible).sum()) for window in windows)
        return 6.0 * weights + 12.0 * config.num_heads * config.head_dim * pairs


def _weights_per_token(config: ModelConfig) -> float:
    """Entries of the layers' matrices that one token meets."""
    names = jax.tree.leaves(param_logical_axes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = zip(jax.tree.leaves(abstract_params(config)), names, strict=True)
    return sum(math.prod(leaf.shape) for leaf, axes in leaves if "layers" in axes and is_matrix(axes))

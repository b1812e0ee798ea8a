"""The count of operations, against one written out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ajgrpo.models.config import ModelConfig
from ajgrpo.packing.batch import build_batch
from ajgrpo.packing.planner import Row
from ajgrpo.training.flops import FlopsCounter, peak_flops
from tests.helpers import make_sample

V, H, F, N, G, D = 50, 16, 24, 4, 2, 8
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": F,
        "num_hidden_layers": 2,
        "num_attention_heads": N,
        "num_key_value_heads": G,
        "head_dim": D,
        "tie_word_embeddings": True,
    }
)


@pytest.mark.parametrize("windows", [(0, 0), (3, 0)])
def test_count(windows: tuple[int, int]) -> None:
    row = Row(64)
    for sample in (make_sample([1, 2, 3, 4, 5]), make_sample([1, 2, 3, 7])):
        row.add(sample)
    # The row: 1 2 3 4 5, and a fork 3 7 below 2; a token that is followed by two tokens is held twice.
    visible = [1, 2, 3, 4, 5, 3, 4]
    batch = build_batch([row, Row(64)], 16, num_sampler_logprobs=0, num_candidates=0)
    assert batch.num_tokens.tolist() == [len(visible), 0]
    weights = 2 * (H * N * D + 2 * H * G * D + N * D * H + 3 * H * F) * len(visible) + V * H * 7
    pairs = sum(min(v, window or v) for window in windows for v in visible)
    config = dataclasses.replace(CONFIG, layer_windows=windows)
    assert FlopsCounter(config).count(batch) == 6 * weights + 12 * N * D * pairs


def test_peaks() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "float16") == 756e12
    assert peak_flops("NVIDIA L4", "bfloat16") == 121e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None

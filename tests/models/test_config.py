"""Reading ``config.json``: spellings, defaults, families, and everything that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ajgrpo.errors import CheckpointError, UnsupportedModelError
from ajgrpo.models.config import ModelConfig
from tests.models.reference import hf_config, model_config


def test_fields_of_a_llama() -> None:
    config = model_config(attention_bias=True, mlp_bias=True)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (50, 24, 40)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert config.attention_bias and config.output_bias and config.mlp_bias and not config.qk_norm
    assert config.rms_norm_eps == 1e-5
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_ids) == (1, 0, (2,))
    assert config.layer_windows == (0, 0)
    assert config.length_limit is None
    assert hash(config) == hash(model_config(attention_bias=True, mlp_bias=True))


def test_families_differ_in_biases_and_norms() -> None:
    qwen2 = model_config("qwen2")
    assert qwen2.attention_bias and not qwen2.output_bias and not qwen2.mlp_bias and not qwen2.qk_norm
    qwen3 = model_config("qwen3")
    assert qwen3.qk_norm and not qwen3.attention_bias and not qwen3.output_bias
    assert model_config("qwen3", attention_bias=True).output_bias
    assert not model_config("qwen3", mlp_bias=True).mlp_bias  # Qwen does not know the key


def test_defaults_of_keys_that_old_files_lack() -> None:
    sparse = dict(vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    llama = ModelConfig.from_hf({"model_type": "llama", **sparse})
    assert (llama.head_dim, llama.num_kv_heads, llama.max_position_embeddings) == (8, 4, 2048)
    assert (llama.rms_norm_eps, llama.rope.theta, llama.tie_word_embeddings, llama.dtype) == (
        1e-6,
        10000.0,
        False,
        "float32",
    )
    assert ModelConfig.from_hf({"model_type": "qwen2", **sparse, "num_key_value_heads": None}).head_dim == 8
    assert ModelConfig.from_hf({"model_type": "qwen3", **sparse}).head_dim == 128


def test_old_and_new_spelling_of_a_real_file_agree() -> None:
    new = hf_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}, dtype="bfloat16")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= dict(rope_theta=1e5, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="torch.bfloat16")
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(new).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (2, {"eos_token_id": [7, 2]}, (2, 7)),
        (None, {"eos_token_id": 5}, (5,)),
        (0, {}, (0,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_tokens_of_both_files_are_merged(config: Any, generation: Any, expected: tuple) -> None:
    assert ModelConfig.from_hf(hf_config(eos_token_id=config), generation).eos_token_ids == expected


def test_sliding_windows() -> None:
    sliding = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert model_config("qwen2", **sliding).layer_windows == (0, 16)
    assert model_config("qwen2", **sliding | dict(use_sliding_window=False)).layer_windows == (0, 0)
    types = ["sliding_attention", "full_attention"]
    assert model_config("qwen3", **sliding, layer_types=types).layer_windows == (16, 0)
    with pytest.raises(CheckpointError, match="sliding_attention"):
        model_config("qwen3", layer_types=types)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "'gpt_oss' is not supported.*llama, qwen2, qwen3.*attention sinks"),
        ({"model_type": None}, "None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "must be a LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported, silu is"),
        ({"dtype": "float64"}, "'float64' is not supported"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'"),
    ],
)
def test_unsupported_models_are_refused_with_what_is_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(hf_config(**changes))


def test_unknown_layer_types_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        model_config("qwen3", layer_types=["full_attention", "linear_attention"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is not even"),
        ({"num_hidden_layers": -1}, "sizes must be positive"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "short_factor must hold head_dim / 2 = 4",
        ),
    ],
)
def test_inconsistent_files_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(hf_config(**changes))

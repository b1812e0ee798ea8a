"""Rope scalings: values by hand, both spellings, and transformers' own frequencies at the sizes of real models."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.errors import UnsupportedModelError
from ajgrpo.models.rope import RopeConfig, inverse_frequencies, rotate, rotation_tables
from tests.models import reference

LLAMA31 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
FACTORS = [1.0 + index / 32 for index in range(32)]
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=FACTORS,
    long_factor=[2 * factor for factor in FACTORS],
    original_max_position_embeddings=4096,
)


def rope(max_positions: int = 8192, **parameters: Any) -> RopeConfig:
    return RopeConfig.from_hf({"rope_parameters": parameters}, max_positions)


def test_default_frequencies_are_powers_of_the_base() -> None:
    frequencies = inverse_frequencies(rope(rope_theta=100.0), 4, 1)
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)


def test_linear_divides_every_frequency() -> None:
    frequencies = inverse_frequencies(rope(rope_type="linear", rope_theta=100.0, factor=4.0), 4, 1)
    np.testing.assert_allclose(frequencies, [0.25, 0.025], rtol=1e-6)


def test_dynamic_is_the_default_within_the_original_context_and_stretches_the_base_beyond() -> None:
    config = rope(max_positions=8, rope_type="dynamic", rope_theta=100.0, factor=2.0)
    assert config.length_limit == 8
    np.testing.assert_allclose(inverse_frequencies(config, 4, 8), [1.0, 0.1], rtol=1e-6)
    # Twice the context: base 100 · (2·2 − 1)^(4/2) = 900.
    np.testing.assert_allclose(inverse_frequencies(config, 4, 16), [1.0, 1 / 30], rtol=1e-6)


def test_longrope_switches_its_divisors_at_the_original_context() -> None:
    config = rope(
        max_positions=16,
        rope_type="longrope",
        rope_theta=100.0,
        short_factor=[1.0, 2.0],
        long_factor=[4.0, 5.0],
        original_max_position_embeddings=8,
    )
    assert config.length_limit == 8
    np.testing.assert_allclose(inverse_frequencies(config, 4, 8), [1.0, 0.05], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(config, 4, 9), [0.25, 0.02], rtol=1e-6)
    assert config.attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(8)))


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    frequencies = np.asarray(inverse_frequencies(rope(131072, **LLAMA31), 128, 1))
    plain = np.asarray(inverse_frequencies(rope(rope_theta=500000.0), 128, 1))
    wavelengths = 2 * math.pi / plain
    np.testing.assert_allclose(frequencies[wavelengths < 2048], plain[wavelengths < 2048], rtol=1e-6)
    np.testing.assert_allclose(frequencies[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6)
    between = (wavelengths > 2048) & (wavelengths < 8192)
    assert between.any()
    assert ((frequencies < plain) & (frequencies > plain / 8))[between].all()


def test_rotation_by_hand() -> None:
    cos, sin = rotation_tables(rope(), 2, jnp.array([0, 1]))
    rotated = rotate(jnp.array([[[3.0, 4.0]], [[3.0, 4.0]]]), cos, sin)
    c, s = math.cos(1.0), math.sin(1.0)
    np.testing.assert_allclose(rotated[:, 0], [[3.0, 4.0], [3 * c - 4 * s, 4 * c + 3 * s]], rtol=1e-6)


def test_scores_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 8)), jnp.float32) for _ in range(2))
    scores = []
    for shift in (0, 5, 11):
        q, k = (rotate(x, *rotation_tables(rope(), 8, jnp.array([p + shift]))) for x, p in ((query, 3), (key, 1)))
        scores.append(float(jnp.vdot(q, k)))
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)


def test_the_attention_factor_scales_both_tables() -> None:
    config = rope(131072, **YARN)
    assert config.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    cos, sin = rotation_tables(config, 8, jnp.arange(3))
    np.testing.assert_allclose(cos**2 + sin**2, np.full((3, 4), config.attention_factor**2), rtol=1e-5)


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA31.items() if k != "rope_theta"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512},
        {"rope_theta": 1e6, "rope_scaling": None},
    ],
)
def test_old_and_new_spelling_agree(old: dict[str, Any]) -> None:
    scaling = dict(old["rope_scaling"] or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    if "original_max_position_embeddings" in old:
        scaling["original_max_position_embeddings"] = old["original_max_position_embeddings"]
    new = {"rope_parameters": {"rope_theta": old["rope_theta"], **scaling}}
    assert RopeConfig.from_hf(old, 4096) == RopeConfig.from_hf(new, 4096)
    assert RopeConfig.from_hf(old, 4096).theta == old["rope_theta"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"mrope_section": [8, 12, 12]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        RopeConfig.from_hf(config, 4096)


@pytest.mark.reference
@pytest.mark.parametrize(
    "parameters",
    [
        LLAMA31,
        YARN,
        YARN | dict(beta_fast=16.0, beta_slow=2.0, truncate=False),
        YARN | dict(mscale=0.7, mscale_all_dim=1.2),
        YARN | dict(attention_factor=1.3),
        LONGROPE,
        LONGROPE | dict(factor=16.0),
        dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
        dict(rope_type="linear", rope_theta=10000.0, factor=8.0),
    ],
)
def test_frequencies_and_attention_factor_equal_transformers(parameters: dict[str, Any]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf_config = reference.hf_config(head_dim=64, max_position_embeddings=131072, rope_parameters=dict(parameters))
    config = transformers.LlamaConfig(**{key: value for key, value in hf_config.items() if key != "model_type"})
    for length in (10, 200_000):
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
        ours = rope(131072, **parameters)
        np.testing.assert_allclose(inverse_frequencies(ours, 64, length), expected.numpy(), rtol=2e-6)
        assert ours.attention_factor == pytest.approx(factor)

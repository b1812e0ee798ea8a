"""Rotary position embeddings (RoPE): the scalings in use, and the rotation.

Every scaling is a choice of inverse frequencies and of one factor on the cosines and sines. ``default``, ``linear``,
``llama3`` and ``yarn`` are fixed when the model is built. ``dynamic`` and ``longrope`` depend on the length of the
sequence: as in transformers, they follow the largest position of the call once it passes
``original_max_positions``. Several sequences in one call then share one choice, so a packed row or a batch of slots
agrees with each sequence alone only up to ``RopeConfig.length_limit``, and callers keep sequences within it.

Formulas: https://arxiv.org/abs/2104.09864 (RoPE), https://arxiv.org/abs/2309.00071 (YaRN and NTK),
https://arxiv.org/abs/2402.13753 (LongRoPE); llama3 as published with Llama 3.1.
Shape suffixes: T tokens, N heads, D head_dim, F = D / 2 frequencies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10_000.0

REQUIRED_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""What each scaling cannot do without; ``yarn`` derives a missing factor from the two lengths."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A rope scaling with its numbers resolved; what a type does not use keeps its default.

    Attributes:
        theta: base of the frequencies.
        type: one of ``ROPE_TYPES``.
        factor: by how much the context is stretched.
        original_max_positions: tokens of context before stretching.
        low_freq_factor, high_freq_factor: llama3's two wavelength bounds.
        beta_fast, beta_slow, truncate: bounds of yarn's ramp, in rotations, and whether they are rounded.
        attention_factor: multiplies cosines and sines (yarn, longrope).
        short_factor, long_factor: longrope's divisor of each frequency within and beyond the original context.
    """

    theta: float = DEFAULT_THETA
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def length_limit(self) -> int | None:
        """Longest sequence (tokens) that a packed row or a batch of slots forwards as it would alone. None: any."""
        return self.original_max_positions if self.type in ("dynamic", "longrope") else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Reads ``rope_scaling`` and ``rope_theta`` (old spelling) or ``rope_parameters`` (new spelling).

        Args:
            config: the content of ``config.json``.
            max_position_embeddings: the model's context length; the default of the original one.

        Raises:
            UnsupportedModelError: an unknown type, a missing number, or a variant that rotates part of a head.
        """
        scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        _refuse_variants(config, scaling)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if missing := [key for key in REQUIRED_KEYS.get(kind, ()) if scaling.get(key) is None]:
            raise UnsupportedModelError(f"rope type {kind!r} needs {', '.join(missing)} in the model's config.json")
        original = max_position_embeddings
        if kind in ("llama3", "yarn", "longrope"):
            # Some checkpoints write it beside the scaling instead of inside; there it takes precedence.
            original = config.get("original_max_position_embeddings") or scaling.get(
                "original_max_position_embeddings", original
            )
        factor = float(scaling.get("factor") or max_position_embeddings / original)
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA),
            type=kind,
            factor=factor if kind != "default" else 1.0,
            original_max_positions=int(original),
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=_attention_factor(kind, scaling, factor, int(original)),
            short_factor=tuple(scaling.get("short_factor") or ()),
            long_factor=tuple(scaling.get("long_factor") or ()),
        )


def rotation_tables(rope: RopeConfig, head_dim: int, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotation, float32 [T, F], the attention factor included.

    Args:
        rope: the scaling.
        head_dim: D, even.
        positions_T: int32 [T], position ids.
    """
    frequencies_F = inverse_frequencies(rope, head_dim, jnp.max(positions_T) + 1)
    angles_TF = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(frequencies_F)[None, :]
    return jnp.cos(angles_TF) * rope.attention_factor, jnp.sin(angles_TF) * rope.attention_factor


def rotate(x_TND: jax.Array, cos_TF: jax.Array, sin_TF: jax.Array) -> jax.Array:
    """Rotates each pair (x[f], x[f + F]) of a head by its angle. Computes in float32, returns the dtype of ``x``."""
    first_TNF, second_TNF = jnp.split(x_TND.astype(jnp.float32), 2, axis=-1)
    cos_T1F, sin_T1F = cos_TF[:, None, :], sin_TF[:, None, :]
    rotated = (first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F)
    return jnp.concatenate(rotated, axis=-1).astype(x_TND.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: jax.Array | int) -> jax.Array | np.ndarray:
    """Radians per position of each frequency, float32 [F].

    Args:
        rope: the scaling.
        head_dim: D.
        length: tokens of the longest sequence, int scalar; only ``dynamic`` and ``longrope`` look at it.
    """
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain_F = np.float32(1.0) / np.power(np.float32(rope.theta), exponents_F)
    if rope.type == "linear":
        return plain_F / np.float32(rope.factor)
    if rope.type == "dynamic":
        return _dynamic(rope, exponents_F, head_dim, length)
    if rope.type == "llama3":
        return _llama3(rope, plain_F)
    if rope.type == "yarn":
        return _yarn(rope, plain_F, head_dim)
    if rope.type == "longrope":
        short_F, long_F = (np.asarray(factor, np.float32) for factor in (rope.short_factor, rope.long_factor))
        return plain_F / jnp.where(length > rope.original_max_positions, long_F, short_F)
    return plain_F


def _dynamic(rope: RopeConfig, exponents_F: np.ndarray, head_dim: int, length: jax.Array | int) -> jax.Array:
    """NTK: beyond the original context the base grows with the length."""
    stretched = jnp.maximum(length, rope.original_max_positions).astype(jnp.float32) / rope.original_max_positions
    base = rope.theta * (rope.factor * stretched - (rope.factor - 1.0)) ** (head_dim / (head_dim - 2))
    return 1.0 / base**exponents_F


def _llama3(rope: RopeConfig, plain_F: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    rotations_F = np.float32(rope.original_max_positions) * plain_F / np.float32(2 * math.pi)
    blend_F = (rotations_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_F = np.clip(blend_F, 0.0, 1.0)
    return ((1 - blend_F) * plain_F / rope.factor + blend_F * plain_F).astype(np.float32)


def _yarn(rope: RopeConfig, plain_F: np.ndarray, head_dim: int) -> np.ndarray:
    """As llama3, with a ramp that is linear in the frequency's index."""

    def index_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # a ramp of no width would divide by zero
    stretch_F = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    return (plain_F / rope.factor * stretch_F + plain_F * (1 - stretch_F)).astype(np.float32)


def _attention_factor(kind: str, scaling: Mapping[str, Any], factor: float, original: int) -> float:
    given = scaling.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1.0 + math.log(factor) / math.log(original))
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return (0.1 * numerator * math.log(factor) + 1.0) / (0.1 * denominator * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _refuse_variants(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor={partial} is not supported; heads are rotated whole")
    if scaling.get("mrope_section"):
        raise UnsupportedModelError("multimodal rope (mrope_section) is not supported; positions are one number each")
    if nested := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
        raise UnsupportedModelError(f"rope parameters by layer type ({', '.join(nested)}) are not supported")

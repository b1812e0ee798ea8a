"""The three device programs of the engine: fill the KV cache, decode one token for every slot, copy a slot.

Shapes (legend): L layers, S slots, C cache positions, G kv heads, H = G * n query heads, D head size, T row positions.

The cache is [L, S, G, C, D]. A decode step reads it and returns only the new keys and values of each layer, which one
scatter then writes in place: carrying the cache itself through the scan over layers would copy all of it every step.
Prefill fills the cache for all tokens *but the last*; the decode step takes that last token and draws the next, so
there is one place where log-probs are computed, after a prompt and after a weight swap alike.

Left out: paged attention, prefix sharing beyond identical sequences.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ajgrpo.models import decoder
from ajgrpo.models.config import ModelConfig
from ajgrpo.ops.attention import TreeMask, tree_attention
from ajgrpo.server.sampling import Array, Controls, Drawn, sample

Params = Any


class KVCache(NamedTuple):
    """Keys and values, each [L, S, G, C, D] in the compute dtype; position c of slot s is valid once written."""

    k: jax.Array
    v: jax.Array


class StepInputs(NamedTuple):
    """One decode step: ``tokens`` int32 [S] go in at ``positions`` int32 [S]. A free slot has position 0."""

    tokens: Array
    positions: Array
    controls: Controls


class PrefillRow(NamedTuple):
    """Whole sequences side by side: int32 [T] each.

    ``subtree_end[t]`` is the end of the sequence that t belongs to; ``slots`` is S for padding, which drops the write.
    """

    tokens: Array
    positions: Array
    subtree_end: Array
    slots: Array


def empty_cache(config: ModelConfig, num_slots: int, length: int, dtype: Any) -> KVCache:
    """A cache of ``length`` positions for each slot."""
    shape = (config.num_layers, num_slots, config.num_kv_heads, length, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


@functools.partial(jax.jit, static_argnames=("length",))
def grow_cache(cache: KVCache, length: int) -> KVCache:
    """The same cache with ``length`` positions."""
    extra = length - cache.k.shape[3]
    return jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, extra), (0, 0))), cache)


@functools.partial(jax.jit, donate_argnames=("cache",))
def copy_slot(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Slot ``target`` becomes a copy of slot ``source`` (int32 scalars)."""
    return jax.tree.map(lambda array: array.at[:, target].set(array[:, source]), cache)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def prefill(config: ModelConfig, params: Params, cache: KVCache, row: PrefillRow) -> KVCache:
    """Writes the keys and values of the row's sequences into their slots."""
    mask = TreeMask(row.subtree_end, row.positions)

    def attend(q_THD: Any, k_TGD: Any, v_TGD: Any, window: Any, _: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out = tree_attention(
            q_THD,
            k_TGD,
            v_TGD,
            mask,
            scale=config.attention_scale,
            window=window,
            softcap=config.attn_softcap,
        )
        return out, (k_TGD, v_TGD)

    with jax.default_matmul_precision("highest"):
        _, new = decoder.forward(
            config,
            params,
            row.tokens,
            row.positions,
            attend,
            layer_state=jnp.arange(config.num_layers),
            compute_dtype=cache.k.dtype,
        )
    return _write(cache, new, row.slots, row.positions)


@functools.partial(jax.jit, static_argnames=("config", "num_top", "num_candidates"), donate_argnames=("cache",))
def decode(
    config: ModelConfig, params: Params, cache: KVCache, inputs: StepInputs, *, num_top: int, num_candidates: int
) -> tuple[KVCache, Drawn]:
    """Forwards one token for every slot and draws the next."""
    attend = functools.partial(_attend_cache, config, inputs.positions)
    with jax.default_matmul_precision("highest"):
        hidden_SH, new = decoder.forward(
            config,
            params,
            inputs.tokens,
            inputs.positions,
            attend,
            layer_state=cache,
            compute_dtype=cache.k.dtype,
        )
        kernel_VH = decoder.head_kernel(config, params).astype(hidden_SH.dtype)
        logits_SV = jnp.einsum("sh,vh->sv", hidden_SH, kernel_VH, preferred_element_type=jnp.float32)
    if config.logit_softcap is not None:
        logits_SV = config.logit_softcap * jnp.tanh(logits_SV / config.logit_softcap)
    drawn = sample(logits_SV, inputs.controls, num_top=num_top, num_candidates=num_candidates)
    slots = jnp.arange(inputs.tokens.shape[0])
    return _write(cache, new, slots, inputs.positions), drawn


def _attend_cache(
    config: ModelConfig,
    positions: jax.Array,
    q_SHD: jax.Array,
    k_SGD: jax.Array,
    v_SGD: jax.Array,
    window: Any,
    cache: KVCache,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attention of one new token in each slot to the slot's cache (one layer's [S, G, C, D]) and to itself."""
    num_slots, num_groups, length, head_dim = cache.k.shape
    q_SGND = q_SHD.reshape(num_slots, num_groups, -1, head_dim)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    past_SGNC = dot("sgnd,sgcd->sgnc", q_SGND, cache.k) * config.attention_scale
    self_SGN = dot("sgnd,sgd->sgn", q_SGND, k_SGD) * config.attention_scale
    if config.attn_softcap is not None:
        past_SGNC = config.attn_softcap * jnp.tanh(past_SGNC / config.attn_softcap)
        self_SGN = config.attn_softcap * jnp.tanh(self_SGN / config.attn_softcap)
    distance_SC = positions[:, None] - jnp.arange(length)[None, :]
    visible_SC = distance_SC > 0
    if window is not None:
        visible_SC &= (jnp.asarray(window) == 0) | (distance_SC < window)
    past_SGNC = jnp.where(visible_SC[:, None, None, :], past_SGNC, -jnp.inf)
    peak_SGN = jnp.maximum(jnp.max(past_SGNC, axis=-1), self_SGN)
    past_SGNC = jnp.exp(past_SGNC - peak_SGN[..., None])
    self_SGN = jnp.exp(self_SGN - peak_SGN)
    total_SGN = jnp.sum(past_SGNC, axis=-1) + self_SGN
    out = dot("sgnc,sgcd->sgnd", past_SGNC.astype(cache.v.dtype), cache.v)
    out = (out + self_SGN[..., None] * v_SGD[:, :, None, :].astype(jnp.float32)) / total_SGN[..., None]
    return out.reshape(q_SHD.shape).astype(q_SHD.dtype), (k_SGD, v_SGD)


def _write(cache: KVCache, new: tuple[jax.Array, jax.Array], slots: jax.Array, positions: jax.Array) -> KVCache:
    """Writes ``new`` (k and v, [L, T, G, D]) at ``[:, slots[t], :, positions[t]]``; a slot out of range is dropped."""

    def put(array: jax.Array, values_LTGD: jax.Array) -> jax.Array:
        values_TLGD = jnp.swapaxes(values_LTGD, 0, 1).astype(array.dtype)
        return array.at[:, slots, :, positions].set(values_TLGD, mode="drop")

    return KVCache(put(cache.k, new[0]), put(cache.v, new[1]))

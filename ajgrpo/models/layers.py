"""The modules of one decoder layer. They hold parameters and their logical axes; all else comes in with the call.

Every module maps tokens one by one; only ``attend``, handed in by the caller, lets tokens see each other. So the same
layer serves a packed row, the prompt of one request, and one token for each of several requests.

Norms and rotations compute in float32, projections in the dtype of their weights (the compute dtype).

Logical axes: vocab, embed, heads, kv, mlp (the sizes V, H, N·D, G·D, F below), None for an axis that is never split.
Shape suffixes: T tokens, H hidden_size, N query heads, G key-value heads, D head_dim, F intermediate_size,
V vocab_size, I and O any number of inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ajgrpo.models.config import ModelConfig
from ajgrpo.models.rope import rotate

Window = int | jax.Array | None
"""A layer's sliding window in tokens: None or 0 for full attention; a traced int32 scalar where layers differ."""

Attend = Callable[[jax.Array, jax.Array, jax.Array, Window, Any], tuple[jax.Array, Any]]
"""``attend(q_TND, k_TGD, v_TGD, window, state) -> (o_TND, new_state)``: attention over whatever the caller keeps.

Queries come rotated but not scaled: the caller applies ``ModelConfig.attention_scale`` and ``attn_softcap``.
``state`` is this layer's slice of the ``layer_state`` given to ``forward``."""

Axis = tuple[str | None, int]
"""A logical axis with its size."""


def _param(initializer: jax.nn.initializers.Initializer, rngs: nnx.Rngs, *axes: Axis) -> nnx.Param[jax.Array]:
    names, shape = zip(*axes, strict=True)
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32), logical_axes=names)


class Linear(nnx.Module):
    """``x @ kernel + bias``, the kernel laid out [in, out]."""

    def __init__(self, inputs: Axis, outputs: Axis, *, bias: bool, std: float, rngs: nnx.Rngs):
        self.kernel = _param(nnx.initializers.normal(std), rngs, inputs, outputs)
        self.bias = _param(nnx.initializers.zeros, rngs, outputs) if bias else None

    def __call__(self, x_TI: jax.Array) -> jax.Array:
        y_TO = x_TI @ self.kernel[...]
        return y_TO if self.bias is None else y_TO + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis: float32 inside, then scaled in the dtype of ``x``."""

    def __init__(self, axis: Axis, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = _param(nnx.initializers.ones, rngs, axis)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(x.dtype)
        return normed.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


class Embedding(nnx.Module):
    """The table of token embeddings, [V, H]; also the head of a model with tied weights."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        std = config.initializer_range
        self.embedding = _param(
            nnx.initializers.normal(std), rngs, ("vocab", config.vocab_size), ("embed", config.hidden_size)
        )


class Head(nnx.Module):
    """The unembedding of a model whose weights are not tied, [V, H]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        std = config.initializer_range
        self.kernel = _param(
            nnx.initializers.normal(std), rngs, ("vocab", config.vocab_size), ("embed", config.hidden_size)
        )


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; query and key norms and biases by configuration."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        embed: Axis = ("embed", config.hidden_size)
        heads: Axis = ("heads", config.num_heads * config.head_dim)
        kv: Axis = ("kv", config.num_kv_heads * config.head_dim)
        std = config.initializer_range
        self.query = Linear(embed, heads, bias=config.attention_bias, std=std, rngs=rngs)
        self.key = Linear(embed, kv, bias=config.attention_bias, std=std, rngs=rngs)
        self.value = Linear(embed, kv, bias=config.attention_bias, std=std, rngs=rngs)
        self.output = Linear(heads, embed, bias=config.output_bias, std=std, rngs=rngs)
        norm_axis: Axis = (None, config.head_dim)
        self.query_norm = RMSNorm(norm_axis, eps=config.rms_norm_eps, rngs=rngs) if config.qk_norm else None
        self.key_norm = RMSNorm(norm_axis, eps=config.rms_norm_eps, rngs=rngs) if config.qk_norm else None

    def __call__(
        self, x_TH: jax.Array, rotation: tuple[jax.Array, jax.Array], window: Window, attend: Attend, state: Any
    ) -> tuple[jax.Array, Any]:
        """``rotation``: see ``rope.rotation_tables``. Returns [T, H] and what ``attend`` made of the state."""
        num_tokens = x_TH.shape[0]
        q_TND = self.query(x_TH).reshape(num_tokens, -1, self.head_dim)
        k_TGD = self.key(x_TH).reshape(num_tokens, -1, self.head_dim)
        v_TGD = self.value(x_TH).reshape(num_tokens, -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q_TND, k_TGD = self.query_norm(q_TND), self.key_norm(k_TGD)
        o_TND, state = attend(rotate(q_TND, *rotation), rotate(k_TGD, *rotation), v_TGD, window, state)
        return self.output(o_TND.reshape(num_tokens, -1)), state


class MLP(nnx.Module):
    """Gated MLP: ``down(silu(gate(x)) · up(x))``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed: Axis = ("embed", config.hidden_size)
        mlp: Axis = ("mlp", config.intermediate_size)
        bias, std = config.mlp_bias, config.initializer_range
        self.gate = Linear(embed, mlp, bias=bias, std=std, rngs=rngs)
        self.up = Linear(embed, mlp, bias=bias, std=std, rngs=rngs)
        self.down = Linear(mlp, embed, bias=bias, std=std, rngs=rngs)

    def __call__(self, x_TH: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_TH)) * self.up(x_TH))


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        axis: Axis = ("embed", config.hidden_size)
        self.attention_norm = RMSNorm(axis, eps=config.rms_norm_eps, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(axis, eps=config.rms_norm_eps, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x_TH: jax.Array, rotation: tuple[jax.Array, jax.Array], window: Window, attend: Attend, state: Any
    ) -> tuple[jax.Array, Any]:
        """Arguments and result as for ``Attention``."""
        attended_TH, state = self.attention(self.attention_norm(x_TH), rotation, window, attend, state)
        x_TH = x_TH + attended_TH
        return x_TH + self.mlp(self.mlp_norm(x_TH)), state

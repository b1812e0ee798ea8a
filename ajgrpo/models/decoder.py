"""The decoder as functions of an explicit parameter tree, made for ``jit``, ``grad`` and ``shard_map``.

    tokens ──▶ embed ──▶ block × L (one scan) ──▶ final norm ──▶ hidden ──(head_kernel, by the caller)──▶ logits
                            └─ attend(q, k, v, window, state): the caller's, a tree mask or a KV cache

The tree is a nested dict with the keys ``embed``, ``block``, ``final`` and, for untied weights, ``head``. The leaves of
``block`` are stacked: their leading axis counts the layers. So compile time does not grow with depth.

Left out: the head's matrix product (never materialised whole, see ``ops.logprobs``) and the attention itself.
Shape suffixes: as in ``layers``; L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from ajgrpo.models.config import ModelConfig
from ajgrpo.models.layers import Attend, Block, Embedding, Head, RMSNorm, Window
from ajgrpo.models.rope import rotation_tables

Params = dict[str, Any]
"""The parameter tree: nested dicts of arrays (or of their shapes, axes or shardings)."""

Unshard = Callable[[str, Params], Params]
"""``unshard(part, tree)``: the whole arrays of ``embed``, ``block`` (one layer's slice), ``final`` or ``head``, ready
to compute with. Called where they are needed; for ``block`` inside the scan and inside the rematerialised region, so
that gathered weights are never saved for the backward pass."""


def abstract_params(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameter tree as ``jax.ShapeDtypeStruct`` leaves of ``dtype``."""
    return _map_parts(
        config,
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)),
        lambda leaf: jax.ShapeDtypeStruct((config.num_layers, *leaf.shape), jnp.dtype(dtype)),
    )


def param_logical_axes(config: ModelConfig) -> Params:
    """The parameter tree with a tuple of logical axis names for each leaf, for example ``("layers", "embed", "mlp")``.

    The names are those in ``layers``; stacked leaves start with ``layers``.
    """
    return _map_parts(
        config,
        lambda leaf: leaf.get_metadata()["logical_axes"],
        lambda leaf: ("layers", *leaf.get_metadata()["logical_axes"]),
    )


def init_params(config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Fresh parameters: normal with ``initializer_range``, norms one, biases zero.

    Args:
        config: the model.
        key: a JAX random key.
        dtype: dtype of every leaf; drawn in float32 and rounded.
    """

    def draw(module: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(module(nnx.Rngs(params=key)), nnx.Param))

    params = {}
    for index, (part, module) in enumerate(_modules(config).items()):
        part_key = jax.random.fold_in(key, index)
        if part == "block":
            layer_keys = jax.random.split(part_key, config.num_layers)
            params[part] = jax.vmap(functools.partial(draw, module))(layer_keys)
        else:
            params[part] = draw(module, part_key)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def forward(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    *,
    layer_state: Any = None,
    compute_dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    unshard: Unshard | None = None,
) -> tuple[jax.Array, Any]:
    """Hidden states of T tokens: a row, a prompt, or one token of each of T requests.

    Args:
        config: the model.
        params: see the module's docstring; possibly shards, if ``unshard`` gathers them.
        tokens: int32 [T].
        positions: int32 [T], position ids.
        attend: see ``layers.Attend``. Its window is None when all layers attend fully, an int when all have the same
            window, else a traced scalar.
        layer_state: pytree whose leaves have a leading axis L; ``attend`` gets one layer's slice. None: it gets None.
        compute_dtype: dtype of activations, and of the weights unless ``unshard`` is given.
        remat: keep only the residual stream of each layer and recompute the rest in the backward pass.
        unshard: see ``Unshard``; default: cast to ``compute_dtype``.

    Returns:
        Hidden states [T, H] after the final norm, in ``compute_dtype``; and what ``attend`` returned as state, stacked
        over the layers. It need not look like ``layer_state``: a server may pass a whole KV cache in and get only the
        new keys and values out, which spares a copy of the cache.
    """
    unshard = unshard or functools.partial(_cast, jnp.dtype(compute_dtype))
    graph = _block_graph(config)
    rotation = rotation_tables(config.rope, config.head_dim, positions)
    windows_L, shared_window = _windows(config)

    def layer(x_TH: jax.Array, inputs: tuple[Params, Any, Any]) -> tuple[jax.Array, Any]:
        shards, window, state = inputs
        block: Block = nnx.merge(graph, unshard("block", shards))
        return block(x_TH, rotation, shared_window if window is None else window, attend, state)

    if remat:
        # Inside a scan the compiler cannot merge the recomputation with the forward pass, so no barrier is needed.
        layer = jax.checkpoint(layer, prevent_cse=False)
    x_TH = lookup(unshard("embed", params["embed"])["embedding"], tokens).astype(compute_dtype)
    x_TH, layer_state = lax.scan(layer, x_TH, (params["block"], windows_L, layer_state))
    norm: RMSNorm = nnx.merge(_final_graph(config), unshard("final", params["final"]))
    return norm(x_TH), layer_state


def head_kernel(config: ModelConfig, params: Params, unshard: Unshard | None = None) -> jax.Array:
    """The unembedding [V, H]; for tied weights the embedding itself. Without ``unshard``: as it is in ``params``."""
    part, leaf = ("embed", "embedding") if config.tie_word_embeddings else ("head", "kernel")
    tree = params[part] if unshard is None else unshard(part, params[part])
    return tree[leaf]


@jax.custom_vjp
def lookup(embedding_VH: jax.Array, tokens: jax.Array) -> jax.Array:
    """The tokens' embeddings [T, H]. Their gradients are summed in float32 whatever the dtype."""
    return embedding_VH[tokens]


def _lookup_forward(embedding_VH: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The embedding is kept for its shape and dtype alone.
    return embedding_VH[tokens], (embedding_VH, tokens)


def _lookup_backward(saved: tuple[jax.Array, jax.Array], gradient_TH: jax.Array) -> tuple[jax.Array, None]:
    embedding_VH, tokens = saved
    summed_VH = jnp.zeros(embedding_VH.shape, jnp.float32).at[tokens].add(gradient_TH.astype(jnp.float32))
    return summed_VH.astype(embedding_VH.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def _cast(dtype: jnp.dtype, part: str, tree: Params) -> Params:
    return tree if part == "embed" else jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def _windows(config: ModelConfig) -> tuple[jax.Array | None, Window]:
    """One window for each layer to scan over (None where all are alike), and the window that all share."""
    if len(set(config.layer_windows)) > 1:
        return jnp.asarray(np.asarray(config.layer_windows, np.int32)), None
    return None, config.layer_windows[0] or None


def _modules(config: ModelConfig) -> dict[str, Callable[[nnx.Rngs], nnx.Module]]:
    """Constructors of the parts, by their key in the parameter tree; ``block`` is built once for each layer."""
    parts: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
        "embed": lambda rngs: Embedding(config, rngs=rngs),
        "block": lambda rngs: Block(config, rngs=rngs),
        "final": lambda rngs: RMSNorm(("embed", config.hidden_size), eps=config.rms_norm_eps, rngs=rngs),
    }
    if not config.tie_word_embeddings:
        parts["head"] = lambda rngs: Head(config, rngs=rngs)
    return parts


@functools.lru_cache(maxsize=32)
def _split(config: ModelConfig, part: str) -> tuple[Any, nnx.State]:
    """A part's structure, and its parameters as variables that hold shapes."""
    module = _modules(config)[part]
    return nnx.split(nnx.eval_shape(lambda: module(nnx.Rngs(0))), nnx.Param)


def _block_graph(config: ModelConfig) -> Any:
    return _split(config, "block")[0]


def _final_graph(config: ModelConfig) -> Any:
    return _split(config, "final")[0]


def _map_parts(config: ModelConfig, plain: Callable[[Any], Any], stacked: Callable[[Any], Any]) -> Params:
    """The parameter tree with ``plain`` (or, for layers, ``stacked``) applied to each ``nnx.Param``."""
    tree = {}
    for part in _modules(config):
        function = stacked if part == "block" else plain
        variables = nnx.to_flat_state(_split(config, part)[1])
        tree[part] = nnx.traversals.unflatten_mapping({path: function(variable) for path, variable in variables})
    return tree

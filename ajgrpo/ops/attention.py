"""Attention over a row that is a prefix tree: every token sees its own history and nothing else.

``tree_attention`` has two implementations with one signature:

- ``xla``: blockwise softmax with a hand-written backward pass. Memory grows linearly in the row's length, and blocks of
  the score matrix that the tree leaves empty are neither computed nor read, so that the cost follows the tree.
- ``dense``: the definition, written down. It holds the whole score matrix: for tests and short rows.

Shapes: T positions, H query heads, G key/value heads (query head h reads key head h // (H / G)), N = H / G, D head
size, B block size, n = number of blocks. Blocked arrays keep a block's N·B query rows in one axis, so that a block is
one matrix product for each key head.

Left out: kernels for one kind of device, and attention over a key/value cache (the server's own).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

IMPLEMENTATIONS = ("auto", "xla", "dense")
DEFAULT_BLOCK = 256
DEFAULT_BLOCK_CPU = 64
"""A CPU wants a block's scores to stay in its cache, and less of a block to be masked; an accelerator fewer steps."""
_BLOCK_MULTIPLE = 16
_MASKED = -1e30  # below every real score, yet finite: the running maximum of a row without keys must not give inf - inf
_UNBOUNDED = 2**30  # wider than any row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeMask:
    """Which keys a query sees, in two integers for each position of a depth-first row.

    ``subtree_end[k]`` is the end (exclusive) of k's subtree: query q sees key k when ``k <= q < subtree_end[k]``.
    ``positions`` holds depths in the tree; only sliding windows read them. Two samples ``a b c d`` and ``a b e`` and a
    pad::

        index        0 1 2 3 4 5              key 0 1 2 3 4 5
        token        a b c d e -         query 0  x
        subtree_end  5 5 4 4 5 6               1  x x
        positions    0 1 2 3 2 0               2  x x x
                                               3  x x x x
                                               4  x x . . x
                                               5  . . . . . x

    A pad is a tree of its own (``subtree_end[i] = i + 1``): it sees itself and nothing sees it.

    Attributes:
        subtree_end: int32 [T].
        positions: int32 [T].
    """

    subtree_end: Array
    positions: Array


def visible(mask: TreeMask, window: int | Array | None = None) -> Array:
    """The mask written out.

    Args:
        mask: the tree.
        window: see ``tree_attention``.

    Returns:
        bool [T, T], ``[query, key]``.
    """
    index = jnp.arange(mask.subtree_end.shape[0], dtype=jnp.int32)
    tree = _Tree(mask.subtree_end, mask.positions, _window_width(window))
    return _see(tree, index, mask.positions, index, mask.subtree_end, mask.positions)


def tree_attention(
    q_THD: Array,
    k_TGD: Array,
    v_TGD: Array,
    mask: TreeMask,
    *,
    scale: float,
    window: int | Array | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
    block: int | None = None,
) -> Array:
    """Attention in which each position of a tree sees its ancestors and itself.

    Scores and sums are float32 whatever the inputs are; weights enter the product with ``v`` in ``q``'s dtype.
    Differentiable in q, k and v. Running it again gives the same bits.

    Args:
        q_THD: queries, float [T, H, D]; not scaled beforehand.
        k_TGD: keys, float [T, G, D]; H must be a multiple of G.
        v_TGD: values, float [T, G, D].
        mask: the tree.
        scale: factor of the scores, usually ``D ** -0.5``.
        window: a query sees only keys fewer than ``window`` positions before it, counted in depth. 0 or None: all. May
            be a traced int32 scalar, so that layers with different windows can share one scan.
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``.
        implementation: ``auto``, ``xla`` or ``dense``.
        block: rows and columns of a block (``xla``); T need not be a multiple. None: what suits the default backend.

    Returns:
        [T, H, D] in ``q``'s dtype.

    Raises:
        ValueError: shapes that do not fit together, an unknown implementation, or a static window below 0.
    """
    if block is None:
        block = DEFAULT_BLOCK_CPU if jax.default_backend() == "cpu" else DEFAULT_BLOCK
    _check(q_THD, k_TGD, v_TGD, mask, window, implementation, block)
    tree = _Tree(mask.subtree_end, mask.positions, _window_width(window))
    if implementation == "dense":
        return _dense(q_THD, k_TGD, v_TGD, tree, scale, softcap)
    length = q_THD.shape[0]
    block = _round_up(-(-length // -(-length // block)), _BLOCK_MULTIPLE)  # as many blocks, evenly filled
    padding = _round_up(length, block) - length
    tree = _pad_tree(tree, padding)
    q, k, v = (jnp.pad(x, ((0, padding), (0, 0), (0, 0))) for x in (q_THD, k_TGD, v_TGD))
    return _blockwise(q, k, v, tree, _Settings(float(scale), softcap, block))[:length]


class _Tree(NamedTuple):
    """A mask with its window: int32 [T], int32 [T], int32 scalar (``_UNBOUNDED``: no window)."""

    subtree_end: Array
    positions: Array
    window: Array


class _Settings(NamedTuple):
    """What is known when tracing."""

    scale: float
    softcap: float | None
    block: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _window_width(window: int | Array | None) -> Array:
    width = jnp.asarray(0 if window is None else window, jnp.int32)
    return jnp.where(width > 0, width, _UNBOUNDED)


def _check(
    q: Array, k: Array, v: Array, mask: TreeMask, window: int | Array | None, implementation: str, block: int
) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if q.ndim != 3 or k.shape != v.shape or k.ndim != 3 or k.shape[::2] != q.shape[::2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q must be [T, H, D] and k, v [T, G, D] with H a multiple of G, got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if mask.subtree_end.shape != q.shape[:1] or mask.positions.shape != q.shape[:1]:
        raise ValueError(
            f"the mask must hold one entry for each of {q.shape[0]} positions, got subtree_end "
            f"{mask.subtree_end.shape} and positions {mask.positions.shape}"
        )
    if isinstance(window, int) and window < 0:
        raise ValueError(f"window must be at least 1, or 0 for full attention, got {window}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")


def _see(tree: _Tree, q_index: Array, q_pos: Array, k_index: Array, k_end: Array, k_pos: Array) -> Array:
    """bool [queries, keys] from their indices, subtree ends and positions."""
    inside = (k_index[None, :] <= q_index[:, None]) & (q_index[:, None] < k_end[None, :])
    return inside & (q_pos[:, None] - k_pos[None, :] < tree.window)


def _cap(scores: Array, softcap: float | None) -> Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _dense(q: Array, k: Array, v: Array, tree: _Tree, scale: float, softcap: float | None) -> Array:
    length, heads, size = q.shape
    groups = k.shape[1]
    see = visible(TreeMask(tree.subtree_end, tree.positions), tree.window)
    q = q.reshape(length, groups, heads // groups, size)
    scores = _cap(scale * jnp.einsum("tgnd,sgd->gnts", q, k, preferred_element_type=jnp.float32), softcap)
    weights = jax.nn.softmax(jnp.where(see[None, None], scores, _MASKED), axis=-1).astype(q.dtype)
    out = jnp.einsum("gnts,sgd->tgnd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(length, heads, size).astype(q.dtype)


# Blockwise: one loop over the live (query block, key block) pairs, forwards and backwards.


def _pad_tree(tree: _Tree, padding: int) -> _Tree:
    length = tree.subtree_end.shape[0]
    ends = jnp.arange(length + 1, length + padding + 1, dtype=tree.subtree_end.dtype)
    positions = jnp.pad(tree.positions, (0, padding))
    return _Tree(jnp.concatenate([tree.subtree_end, ends]), positions, tree.window)


def live_pairs(subtree_end: Array, positions: Array, window: Array, block: int) -> tuple[Array, Array, Array]:
    """The blocks of the score matrix that may hold a visible key, a query block's keys in ascending order.

    Args:
        subtree_end: int32 [T], T a multiple of ``block``.
        positions: int32 [T].
        window: int32 scalar, above 0.
        block: rows and columns of a block.

    Returns:
        Query block int32 [n·n], key block int32 [n·n], and how many of them are live, int32 (they come first).
    """
    ends, positions = subtree_end.reshape(-1, block), positions.reshape(-1, block)
    index = jnp.arange(ends.shape[0], dtype=jnp.int32)
    live = (index[None, :] <= index[:, None]) & (index[:, None] * block < ends.max(1)[None, :])
    live &= positions.min(1)[:, None] - positions.max(1)[None, :] < window
    q_blocks, k_blocks = jnp.nonzero(live, size=live.size, fill_value=0)
    return q_blocks.astype(jnp.int32), k_blocks.astype(jnp.int32), live.sum(dtype=jnp.int32)


def _to_blocks(x_THD: Array, groups: int, block: int) -> Array:
    """[T, H, D] → [n, G, N·B, D]."""
    length, heads, size = x_THD.shape
    x = x_THD.reshape(length // block, block, groups, heads // groups, size)
    return x.transpose(0, 2, 3, 1, 4).reshape(length // block, groups, -1, size)


def _from_blocks(x: Array, heads: int, block: int) -> Array:
    """[n, G, N·B, D] → [T, H, D]."""
    blocks, groups, _, size = x.shape
    x = x.reshape(blocks, groups, heads // groups, block, size)
    return x.transpose(0, 3, 1, 2, 4).reshape(blocks * block, heads, size)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _block_at(x: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _add_block(x: Array, i: Array, addend: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, _block_at(x, i) + addend, i, 0)


def _block_scores(q_block: Array, k_block: Array, settings: _Settings) -> Array:
    """f32 [G, N·B, B]."""
    return _cap(_dot("gqd,gkd->gqk", q_block, k_block) * settings.scale, settings.softcap)


def _block_see(tree: _Tree, i: Array, j: Array, block: int, repeats: int) -> Array:
    """bool [N·B, B]: what query block i sees of key block j, the same for each of the N heads of a group."""
    offset = jnp.arange(block, dtype=jnp.int32)
    q_pos, k_pos = (lax.dynamic_slice_in_dim(tree.positions, x * block, block) for x in (i, j))
    k_end = lax.dynamic_slice_in_dim(tree.subtree_end, j * block, block)
    see = _see(tree, i * block + offset, q_pos, j * block + offset, k_end, k_pos)
    return jnp.broadcast_to(see[None], (repeats, block, block)).reshape(repeats * block, block)


def _forward(q: Array, k: Array, v: Array, tree: _Tree, settings: _Settings) -> tuple[Array, Array]:
    """Blocked output [n, G, N·B, D] in q's dtype, and the log-sum-exp of each score row, f32 [n, G, N·B]."""
    block, groups, heads = settings.block, k.shape[1], q.shape[1]
    q_blocks, k_blocks, v_blocks = (_to_blocks(x, groups, block) for x in (q, k, v))
    pair_q, pair_k, count = live_pairs(*tree, block)

    def step(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, j = pair_q[t], pair_k[t]
        total, top, out = (_block_at(x, i) for x in carry)
        see = _block_see(tree, i, j, block, heads // groups)
        scores = _block_scores(_block_at(q_blocks, i), _block_at(k_blocks, j), settings)
        new_top = jnp.maximum(top, jnp.where(see[None], scores, _MASKED).max(-1))
        weights = jnp.where(see[None], jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(-1)
        out = out * decay[..., None] + _dot("gqk,gkd->gqd", weights.astype(q.dtype), _block_at(v_blocks, j))
        new = (total, new_top, out)
        return tuple(lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(carry, new, strict=True))

    rows = q_blocks.shape[:-1]
    start = (jnp.zeros(rows, jnp.float32), jnp.full(rows, _MASKED, jnp.float32), jnp.zeros(q_blocks.shape, jnp.float32))
    total, top, out = lax.fori_loop(0, count, step, start)
    return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)


_Saved = tuple[Array, Array, Array, _Tree, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: Array, k: Array, v: Array, tree: _Tree, settings: _Settings) -> Array:
    out, _ = _forward(q, k, v, tree, settings)
    return _from_blocks(out, q.shape[1], settings.block)


def _blockwise_fwd(q: Array, k: Array, v: Array, tree: _Tree, settings: _Settings) -> tuple[Array, _Saved]:
    out, lse = _forward(q, k, v, tree, settings)
    return _from_blocks(out, q.shape[1], settings.block), (q, k, v, tree, out, lse)


def _blockwise_bwd(settings: _Settings, saved: _Saved, d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, tree, out, lse = saved
    block, groups, heads = settings.block, k.shape[1], q.shape[1]
    q_blocks, k_blocks, v_blocks, do_blocks = (_to_blocks(x, groups, block) for x in (q, k, v, d_out))
    pair_q, pair_k, count = live_pairs(*tree, block)
    # A softmax row's gradient is p * (dp - Σ p dp), and Σ p dp = Σ do · o needs no score.
    inner = (do_blocks.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def step(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        i, j = pair_q[t], pair_k[t]
        qi, doi, lse_i, inner_i = (_block_at(x, i) for x in (q_blocks, do_blocks, lse, inner))
        kj, vj = _block_at(k_blocks, j), _block_at(v_blocks, j)
        see = _block_see(tree, i, j, block, heads // groups)
        scores = _block_scores(qi, kj, settings)
        weights = jnp.where(see[None], jnp.exp(scores - lse_i[..., None]), 0.0)
        d_scores = weights * (_dot("gqd,gkd->gqk", doi, vj) - inner_i[..., None]) * settings.scale
        if settings.softcap is not None:
            d_scores *= 1.0 - jnp.square(scores / settings.softcap)
        weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
        dq = _add_block(dq, i, _dot("gqk,gkd->gqd", d_scores, kj))
        dk = _add_block(dk, j, _dot("gqk,gqd->gkd", d_scores, qi))
        dv = _add_block(dv, j, _dot("gqk,gqd->gkd", weights, doi))
        return dq, dk, dv

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_blocks, k_blocks, v_blocks))
    dq, dk, dv = lax.fori_loop(0, count, step, start)
    dq, dk, dv = (_from_blocks(d, x.shape[1], block).astype(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)

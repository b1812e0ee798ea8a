"""Log-probs and entropy of the language-model head, without the matrix of logits.

The head's logits for M loss terms over V vocabulary entries would be the largest array of a training step. Here they
are computed in tiles of some rows by some vocabulary entries, forwards and again backwards, and row tiles without a
live row are skipped. ``head_statistics`` is made of two parts:

- ``_head``: log-sum-exp, entropy and the logits at chosen ids, tiled, with a hand-written backward pass;
- ordinary array operations on [M, N] and [M, C], which JAX differentiates.

Repeated ids are merged before ``_head`` sees them, so that its scatter adds to every place at most once and a rerun
gives the same bits.

Shapes: M rows (loss terms), H hidden size, V vocabulary entries, N ids of each row, C candidates of each row, R rows of
a tile, W vocabulary entries of a tile. The last tile of either kind overlaps the one before it where R or W do not
divide M or V; what it repeats is masked, so that no array is padded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

MAX_TILE = (512, 4096)
MAX_TILE_CPU = (128, 2048)
"""Rows and vocabulary entries of a tile; smaller on a CPU, so that a tile's logits stay in the cache."""
_MASKED = -1e30  # below every real logit, yet finite: exp(_MASKED - lse) is 0 and 0 * (_MASKED - lse) is not NaN


class _Settings(NamedTuple):
    """What is known when tracing."""

    temperature: float
    softcap: float | None
    row_tile: int
    vocab_tile: int


def head_statistics(
    hidden_MH: Array,
    kernel_VH: Array,
    ids_MN: Array,
    num_rows: int | Array,
    *,
    temperature: float,
    softcap: float | None = None,
    candidate_ids: Array | None = None,
    row_tile: int | None = None,
    vocab_tile: int | None = None,
) -> tuple[Array, Array]:
    """Log-probs of chosen tokens and the entropy of the distribution that they belong to.

    The distribution is ``softmax(cap(hidden @ kernel.T) / temperature)`` over the vocabulary, or, for a row that names
    candidates, over those alone. Differentiable in ``hidden`` and ``kernel``, through both results. Sums are float32.

    Args:
        hidden_MH: final hidden states, float [M, H].
        kernel_VH: the head's weights, float [V, H].
        ids_MN: int32 [M, N]; -1 pads; an id may be repeated.
        num_rows: how many rows are live; they come first. May be a traced int32 scalar: the work follows it.
        temperature: divides the logits; above 0.
        softcap: replaces a logit z by ``softcap * tanh(z / softcap)``, before the temperature.
        candidate_ids: int32 [M, C], distinct ids in each row, -1 pads. A row that names none uses the vocabulary.
        row_tile: most rows of a tile. None: what suits the default backend.
        vocab_tile: most vocabulary entries of a tile. None: as for ``row_tile``.

    Returns:
        Log-probs float32 [M, N] and entropy in nats float32 [M]. The log-prob is 0 for a padded id and -inf for an id
        outside its row's candidates; neither has a gradient. Rows from ``num_rows`` on are 0.

    Raises:
        ValueError: shapes that do not fit together, or a temperature that is not above 0.
    """
    _check(hidden_MH, kernel_VH, ids_MN, candidate_ids, temperature)
    rows, vocabulary = hidden_MH.shape[0], kernel_VH.shape[0]
    suited = MAX_TILE_CPU if jax.default_backend() == "cpu" else MAX_TILE
    row_tile, vocab_tile = row_tile or suited[0], vocab_tile or suited[1]
    settings = _Settings(float(temperature), softcap, min(row_tile, rows), min(vocab_tile, vocabulary))
    num_rows = jnp.clip(jnp.asarray(num_rows, jnp.int32), 0, rows)
    live = jnp.arange(rows, dtype=jnp.int32) < num_rows
    ids = jnp.where(live[:, None], ids_MN, -1)
    place = jnp.argmax(ids[:, :, None] == ids[:, None, :], axis=-1)  # of the first entry that is the same id
    distinct = jnp.where(place == jnp.arange(ids.shape[1])[None, :], ids, -1)
    if candidate_ids is None or candidate_ids.shape[1] == 0:
        lse, entropy, logits = _head(hidden_MH, kernel_VH, distinct, num_rows, settings)
        log_probs = _pick(logits, place) - lse[:, None]
    else:
        candidates = jnp.where(live[:, None], candidate_ids, -1)
        named = (candidates >= 0).any(-1)
        own = jnp.where(named[:, None], -1, distinct)  # rows with candidates find their logits among those
        head_ids = jnp.concatenate([own, candidates], axis=1)
        lse, entropy, logits = _head(hidden_MH, kernel_VH, head_ids, num_rows, settings)
        own_logits, candidate_logits = jnp.split(logits, [ids.shape[1]], axis=1)
        inside, inside_entropy = _candidate_statistics(candidate_logits, candidates, ids)
        log_probs = jnp.where(named[:, None], inside, _pick(own_logits, place) - lse[:, None])
        entropy = jnp.where(named, inside_entropy, entropy)
    return jnp.where(ids >= 0, log_probs, 0.0), jnp.where(live, entropy, 0.0)


def _check(hidden: Array, kernel: Array, ids: Array, candidates: Array | None, temperature: float) -> None:
    if hidden.ndim != 2 or kernel.ndim != 2 or hidden.shape[1] != kernel.shape[1]:
        raise ValueError(f"hidden must be [M, H] and kernel [V, H], got {hidden.shape} and {kernel.shape}")
    for name, array in (("ids", ids), ("candidate_ids", candidates)):
        if array is not None and (array.ndim != 2 or array.shape[0] != hidden.shape[0]):
            raise ValueError(f"{name} must be 2-dimensional with {hidden.shape[0]} rows, got {array.shape}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def _pick(values_MN: Array, place_MN: Array) -> Array:
    """``take_along_axis(values, place, 1)`` whose gradient is a sum instead of a scatter (so in a fixed order)."""
    chosen = place_MN[:, :, None] == jnp.arange(values_MN.shape[1])[None, None, :]
    return jnp.where(chosen, values_MN[:, None, :], 0.0).sum(-1)


def _candidate_statistics(logits_MC: Array, candidates_MC: Array, ids_MN: Array) -> tuple[Array, Array]:
    """Log-probs [M, N] (-inf outside) and entropy [M] over candidates; rows without any give finite nonsense."""
    valid = candidates_MC >= 0
    lse = jax.nn.logsumexp(jnp.where(valid, logits_MC, _MASKED), axis=-1)
    # The inner where keeps both branches of the outer one finite, and so its gradient free of NaN.
    log_probs = jnp.where(valid, logits_MC - lse[:, None], 0.0)
    entropy = -jnp.where(valid, jnp.exp(log_probs) * log_probs, 0.0).sum(-1)
    match = (ids_MN[:, :, None] == candidates_MC[:, None, :]) & valid[:, None, :]
    found = jnp.where(match, log_probs[:, None, :], 0.0).sum(-1)
    return jnp.where(match.any(-1), found, -jnp.inf), entropy


# The tiled head. ``ids`` are distinct within a row, or -1.


def _rows_at(x: Array, start: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, 0)


def _put_rows(x: Array, rows: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, rows, start, 0)


def _tile(index: Array, size: int, total: int) -> tuple[Array, Array]:
    """Start of tile ``index``, shifted so that it fits, and bool [size]: which of its entries no earlier tile held."""
    start = jnp.minimum(index * size, total - size)
    return start, start + jnp.arange(size, dtype=jnp.int32) >= index * size


def _tile_logits(hidden_RH: Array, kernel_WH: Array, fresh_W: Array, settings: _Settings) -> Array:
    """f32 [R, W], capped and divided by the temperature; ``_MASKED`` where an earlier tile held the entry."""
    logits = jnp.einsum("rh,wh->rw", hidden_RH, kernel_WH, preferred_element_type=jnp.float32)
    if settings.softcap is not None:
        logits = settings.softcap * jnp.tanh(logits / settings.softcap)
    return jnp.where(fresh_W[None, :], logits / settings.temperature, _MASKED)


def _local(ids_RN: Array, start: Array, fresh_W: Array) -> tuple[Array, Array]:
    """Columns [R, N] of ids within a vocabulary tile, and which of them it is the one to serve."""
    column = ids_RN - start
    inside = (ids_RN >= 0) & (column >= 0) & (column < fresh_W.shape[0])
    column = jnp.where(inside, column, 0)
    return column, inside & fresh_W[column]


def _forward(hidden: Array, kernel: Array, ids: Array, num_rows: Array, s: _Settings) -> tuple[Array, Array, Array]:
    """``_head`` without its last step: rows of a live tile that are not live hold nonsense."""
    (rows, _), vocabulary = hidden.shape, kernel.shape[0]

    def row_step(index: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start, _ = _tile(index, s.row_tile, rows)
        hidden_RH, ids_RN = _rows_at(hidden, start, s.row_tile), _rows_at(ids, start, s.row_tile)

        def vocab_step(u: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            top, total, mean, at_ids = carry
            begin, fresh = _tile(u, s.vocab_tile, vocabulary)
            logits = _tile_logits(hidden_RH, _rows_at(kernel, begin, s.vocab_tile), fresh, s)
            new_top = jnp.maximum(top, logits.max(-1))
            decay, weights = jnp.exp(top - new_top), jnp.exp(logits - new_top[:, None])
            # mean = Σ exp(x - top) (x - top): relative to the top, the entropy does not cancel large logits.
            mean = decay * (mean + total * (top - new_top)) + (weights * (logits - new_top[:, None])).sum(-1)
            column, hit = _local(ids_RN, begin, fresh)
            at_ids = jnp.where(hit, jnp.take_along_axis(logits, column, axis=1), at_ids)
            return new_top, total * decay + weights.sum(-1), mean, at_ids

        zero = jnp.zeros(s.row_tile, jnp.float32)
        first = (zero + _MASKED, zero, zero, jnp.zeros(ids_RN.shape, jnp.float32))
        top, total, mean, at_ids = lax.fori_loop(0, -(-vocabulary // s.vocab_tile), vocab_step, first)
        tiles = (top + jnp.log(total), jnp.log(total) - mean / total, at_ids)
        return (
            _put_rows(out[0], tiles[0], start),
            _put_rows(out[1], tiles[1], start),
            _put_rows(out[2], tiles[2], start),
        )

    zeros = jnp.zeros(rows, jnp.float32)
    return lax.fori_loop(0, -(-num_rows // s.row_tile), row_step, (zeros, zeros, jnp.zeros(ids.shape, jnp.float32)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _head(hidden: Array, kernel: Array, ids: Array, num_rows: Array, s: _Settings) -> tuple[Array, Array, Array]:
    """Log-sum-exp [M], entropy [M], logits at ids [M, N] (0 where padded) of the rows before ``num_rows``; f32."""
    return _forward(hidden, kernel, ids, num_rows, s)


def _head_fwd(hidden: Array, kernel: Array, ids: Array, num_rows: Array, s: _Settings) -> tuple:
    lse, entropy, at_ids = _forward(hidden, kernel, ids, num_rows, s)
    return (lse, entropy, at_ids), (hidden, kernel, ids, num_rows, lse, entropy)


def _head_bwd(s: _Settings, saved: tuple, grads: tuple[Array, Array, Array]) -> tuple[Array, Array, None, None]:
    hidden, kernel, ids, num_rows, lse, entropy = saved
    rows, vocabulary = hidden.shape[0], kernel.shape[0]

    def vocab_step(u: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_kernel = carry
        begin, fresh = _tile(u, s.vocab_tile, vocabulary)
        kernel_WH = _rows_at(kernel, begin, s.vocab_tile)

        def row_step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_tile = carry
            start, fresh_R = _tile(index, s.row_tile, rows)
            fresh_R &= start + jnp.arange(s.row_tile) < num_rows
            at = functools.partial(_rows_at, start=start, size=s.row_tile)
            hidden_RH = jnp.where(fresh_R[:, None], at(hidden), 0)  # so that rows which do not count cannot bring NaN
            logits = _tile_logits(hidden_RH, kernel_WH, fresh, s)
            grads_R = at(grads[0]), at(grads[1]), at(grads[2])
            d = _tile_gradient(logits, at(lse), at(entropy), grads_R, _local(at(ids), begin, fresh), s)
            d = jnp.where(fresh_R[:, None], d, 0.0).astype(kernel.dtype)
            d_tile = d_tile + jnp.einsum("rw,rh->wh", d, hidden_RH, preferred_element_type=jnp.float32)
            addend = jnp.einsum("rw,wh->rh", d, kernel_WH, preferred_element_type=jnp.float32)
            return _put_rows(d_hidden, at(d_hidden) + addend, start), d_tile

        zero = jnp.zeros(kernel_WH.shape, jnp.float32)
        d_hidden, d_tile = lax.fori_loop(0, -(-num_rows // s.row_tile), row_step, (d_hidden, zero))
        d_tile = _rows_at(d_kernel, begin, s.vocab_tile) + d_tile.astype(kernel.dtype)
        return d_hidden, _put_rows(d_kernel, d_tile, begin)

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(kernel))
    d_hidden, d_kernel = lax.fori_loop(0, -(-vocabulary // s.vocab_tile), vocab_step, start)
    return d_hidden.astype(hidden.dtype), d_kernel, None, None


def _tile_gradient(
    logits_RW: Array,
    lse_R: Array,
    entropy_R: Array,
    grads: tuple[Array, Array, Array],
    local: tuple[Array, Array],
    s: _Settings,
) -> Array:
    """Gradient f32 [R, W] of the raw logits (before cap and temperature) from those of ``_head``'s results."""
    (d_lse, d_entropy, d_at_ids), (column, hit) = grads, local
    log_probs = logits_RW - lse_R[:, None]
    # ∂lse/∂x = p and ∂entropy/∂x = -p (log p + entropy)
    d = jnp.exp(log_probs) * (d_lse[:, None] - d_entropy[:, None] * (log_probs + entropy_R[:, None]))
    rows = jnp.arange(logits_RW.shape[0])[:, None]
    d = d.at[rows, jnp.where(hit, column, logits_RW.shape[1])].add(d_at_ids, mode="drop") / s.temperature
    if s.softcap is not None:
        tanh = jnp.maximum(logits_RW * (s.temperature / s.softcap), -1.0)  # the square of _MASKED would be inf
        d *= 1.0 - jnp.square(tanh)
    return d


_head.defvjp(_head_fwd, _head_bwd)

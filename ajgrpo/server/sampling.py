"""Drawing tokens on the device: temperature, truncation, log-probs, and random numbers that belong to a request.

A random number depends on the request's seed and on how many tokens it has drawn, and on nothing else, so a request
gives the same tokens whatever shares the batch. Tokens are drawn by inverting the distribution function with one
uniform number a token, which costs one pass over the vocabulary where a Gumbel argmax needs V random numbers.

Shapes: S slots, V vocabulary, N top log-probs, K candidates.

Left out: penalties, logit bias, bad words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any
"""A jax.Array on the device, a NumPy array on the host."""

BLOCK = 256
"""The distribution function is summed in blocks, so that a draw needs no running sum over the whole vocabulary."""


class Controls(NamedTuple):
    """How each slot samples: float32 [S] unless said otherwise.

    ``temperature`` 0 is greedy; ``top_p`` 1, ``min_p`` 0 and ``top_k`` (int32) 0 are off; ``seeds`` is uint32 [S, 2];
    ``index`` (int32) counts the tokens that the request has drawn.
    """

    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    seeds: Array
    index: Array


class Drawn(NamedTuple):
    """The outcome of a step, under the processed distribution (after temperature and truncation).

    ``token`` int32 [S], ``log_prob`` float32 [S], ``top_ids`` int32 [S, N] by falling likelihood, ``top_log_probs``
    float32 [S, N] (-inf outside the truncation), ``candidates`` int32 [S, K], -1 where not in the support.
    """

    token: Array
    log_prob: Array
    top_ids: Array
    top_log_probs: Array
    candidates: Array


def sample(logits_SV: jax.Array, controls: Controls, *, num_top: int, num_candidates: int) -> Drawn:
    """Draws one token for each slot from float32 logits.

    Args:
        num_top: N ≥ 1.
        num_candidates: K, at least every truncated slot's ``top_k`` (V when one has none); 0 when no slot truncates.
    """
    greedy = controls.temperature == 0.0
    scaled_SV = logits_SV / jnp.where(greedy, 1.0, controls.temperature)[:, None]
    normaliser = jax.nn.logsumexp(scaled_SV, axis=-1)
    # The barrier keeps XLA from moving the slices below into the top-k, which would make it a sort of the vocabulary.
    values, ids = jax.lax.optimization_barrier(jax.lax.top_k(scaled_SV, max(num_top, num_candidates)))
    uniform = jax.vmap(_uniform)(controls.seeds, controls.index)
    token = draw(jnp.exp(scaled_SV - normaliser[:, None]), uniform)
    candidates = jnp.zeros((logits_SV.shape[0], 0), jnp.int32)
    top_log_probs = values[:, :num_top]
    if num_candidates:
        truncated = ~greedy & ((controls.top_k > 0) | (controls.top_p < 1.0) | (controls.min_p > 0.0))
        kept = support(values[:, :num_candidates], controls)
        kept_values = jnp.where(kept, values[:, :num_candidates], -jnp.inf)
        normaliser = jnp.where(truncated, jax.nn.logsumexp(kept_values, axis=-1), normaliser)
        choice = draw(jnp.exp(kept_values - normaliser[:, None]), uniform)
        token = jnp.where(truncated, jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0], token)
        candidates = jnp.where(kept & truncated[:, None], ids[:, :num_candidates], -1)
        outside = truncated[:, None] & ~_padded(kept, num_top)
        top_log_probs = jnp.where(outside, -jnp.inf, top_log_probs)
    token = jnp.where(greedy, ids[:, 0], token)
    log_prob = jnp.take_along_axis(scaled_SV, token[:, None], axis=1)[:, 0] - normaliser
    return Drawn(token, log_prob, ids[:, :num_top], top_log_probs - normaliser[:, None], candidates)


def support(values_SK: jax.Array, controls: Controls) -> jax.Array:
    """Which of the K most likely tokens (scaled logits, falling) each slot may draw: bool [S, K], a prefix of each row.

    Min-p keeps tokens at least ``min_p`` times as likely as the likeliest; top-k the first k; top-p, over what these
    leave, the shortest prefix that holds the mass ``top_p``, and always the first token.
    """
    rank = jnp.arange(values_SK.shape[1])[None, :]
    kept = (controls.top_k[:, None] == 0) | (rank < controls.top_k[:, None])
    ratio = jnp.exp(values_SK - values_SK[:, :1])
    kept &= ratio >= controls.min_p[:, None]
    mass = jnp.where(kept, ratio, 0.0)
    share = mass / jnp.sum(mass, axis=-1, keepdims=True)
    before = jnp.cumsum(share, axis=-1) - share
    # A threshold of 1 must keep everything, whatever the rounding of the running sum.
    kept &= (controls.top_p[:, None] >= 1.0) | (before < controls.top_p[:, None])
    return kept | (rank == 0)


def draw(probs_SV: jax.Array, uniform_S: jax.Array) -> jax.Array:
    """Index int32 [S] of the token at which the running sum of the probabilities passes ``uniform`` in [0, 1).

    The probabilities need not sum to exactly 1. A token of probability 0 is never drawn.
    """
    num_slots, vocab = probs_SV.shape
    blocks = jnp.pad(probs_SV, ((0, 0), (0, -vocab % BLOCK))).reshape(num_slots, -1, BLOCK)
    ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = uniform_S * ends[:, -1]
    block = _first_above(ends, target, jnp.sum(blocks, axis=-1))
    start = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), block[:, None], axis=1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    offset = _first_above(start + jnp.cumsum(inside, axis=-1), target, inside)
    return (block * BLOCK + offset).astype(jnp.int32)


def _first_above(running: jax.Array, target: jax.Array, mass: jax.Array) -> jax.Array:
    """First entry with mass whose running sum exceeds the target; the last with mass when rounding leaves none."""
    hit = (running > target[:, None]) & (mass > 0)
    last = mass.shape[1] - 1 - jnp.argmax(mass[:, ::-1] > 0, axis=-1)
    return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last)


def _uniform(seed: jax.Array, index: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, index))


def _padded(kept: jax.Array, width: int) -> jax.Array:
    """``kept`` with exactly ``width`` columns; added ones are False."""
    return jnp.pad(kept, ((0, 0), (0, max(0, width - kept.shape[1]))))[:, :width]

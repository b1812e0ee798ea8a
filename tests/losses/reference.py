"""Direct NumPy evaluation (float64) of the losses and of their gradients, term by term, from a policy's logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ajgrpo.losses import LossExtras, LossFn


@dataclasses.dataclass
class Terms:
    """M loss terms of a softmax policy over V tokens: everything a loss reads, before padding is treated specially."""

    logits: np.ndarray  # [M, V]
    targets: np.ndarray  # [M]
    old_log_probs: np.ndarray  # [M]
    advantages: np.ndarray  # [M]
    mask: np.ndarray  # [M]
    sample: np.ndarray  # [M]
    sampler_ids: np.ndarray  # [M, K]
    sampler_log_probs: np.ndarray  # [M, K]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def random_terms(seed: int, terms: int = 40, vocabulary: int = 11, top: int = 4, mismatch: float = 0.8) -> Terms:
    """A policy and a sampler that differ by ``mismatch``; the sampler's ``top`` likeliest tokens; some padding."""
    rng = np.random.default_rng(seed)
    sampler = log_softmax(rng.normal(size=(terms, vocabulary)) * 1.5)
    logits = sampler + rng.normal(size=sampler.shape) * mismatch
    targets = np.array([rng.choice(vocabulary, p=np.exp(row) / np.exp(row).sum()) for row in sampler])
    sampler_ids = np.argsort(-sampler, axis=1)[:, :top].astype(np.int32)
    sampler_log_probs = np.take_along_axis(sampler, sampler_ids, 1)
    if top < vocabulary:  # fewer than K reported
        sampler_ids[::5, -1], sampler_log_probs[::5, -1] = -1, -np.inf
    return Terms(
        logits=logits,
        targets=targets,
        old_log_probs=sampler[np.arange(terms), targets],
        advantages=rng.normal(size=terms),
        mask=np.arange(terms) < terms - 6,
        sample=np.arange(terms) // 8,
        sampler_ids=sampler_ids,
        sampler_log_probs=sampler_log_probs,
    )


@functools.partial(jax.jit, static_argnames="loss")
def loss_and_gradient(
    logits: jax.Array,
    targets: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    loss: LossFn,
    **known: jax.Array,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Per-token loss, gradient of its masked sum by the logits, and metrics; ``known`` are fields of the extras."""

    def summed(logits: jax.Array) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        log_probs = jax.nn.log_softmax(logits)
        named = known["sampler_ids"] >= 0
        top = jnp.take_along_axis(log_probs, jnp.where(named, known["sampler_ids"], 0), axis=1)
        extras = LossExtras(
            **known,
            policy_top_log_probs=jnp.where(named, top, 0.0),
            entropy=-(jnp.exp(log_probs) * log_probs).sum(-1),
            versions=jnp.zeros(len(logits), jnp.int32),
        )
        chosen = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
        per_token, metrics = loss(chosen, old_log_probs, advantages, extras)
        return jnp.where(extras.mask, per_token, 0.0).sum(), (per_token, metrics)

    (_, (per_token, metrics)), gradient = jax.value_and_grad(summed, has_aux=True)(logits)
    return per_token, gradient, metrics


def evaluate(loss: LossFn, terms: Terms) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Per-token loss [M], gradient of its masked sum by the logits [M, V], and metrics, from the JAX loss."""
    results = loss_and_gradient(
        np.asarray(terms.logits, np.float32),
        np.asarray(terms.targets, np.int32),
        np.asarray(terms.old_log_probs, np.float32),
        np.asarray(terms.advantages, np.float32),
        loss=loss,
        mask=terms.mask,
        sample=np.asarray(terms.sample, np.int32),
        sampler_ids=np.asarray(terms.sampler_ids, np.int32),
        sampler_log_probs=np.asarray(terms.sampler_log_probs, np.float32),
    )
    return jax.tree.map(np.asarray, results)


def score(log_probs: np.ndarray, token: int) -> np.ndarray:
    """∇ log π(token) by the logits."""
    return np.eye(len(log_probs))[token] - np.exp(log_probs)


def score_centering(terms: Terms, clip_min: float, clip_max: float) -> tuple[np.ndarray, np.ndarray]:
    """Per-token value and gradient by the logits."""
    policy = log_softmax(terms.logits)
    values, gradients = np.zeros(len(policy)), np.zeros(policy.shape)

    def kept(ratio: float) -> float:
        return ratio if clip_min <= ratio <= clip_max else 0.0

    for m in np.flatnonzero(terms.mask):
        target = terms.targets[m]
        f = kept(np.exp(policy[m, target] - terms.old_log_probs[m]))
        value, gradient = f, f * score(policy[m], target)
        for token, log_mu in zip(terms.sampler_ids[m], terms.sampler_log_probs[m], strict=True):
            if token < 0:
                continue
            f = kept(np.exp(policy[m, token] - log_mu))
            value -= np.exp(log_mu) * f
            gradient = gradient - np.exp(log_mu) * f * score(policy[m], token)
        values[m], gradients[m] = -terms.advantages[m] * value, -terms.advantages[m] * gradient
    return values, gradients


def clipped(
    terms: Terms, clip_min: float, clip_max: float, epsilon: float, epsilon_high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Per-token value and gradient by the logits."""
    policy = log_softmax(terms.logits)
    values, gradients = np.zeros(len(policy)), np.zeros(policy.shape)
    for m in np.flatnonzero(terms.mask):
        target, advantage = terms.targets[m], terms.advantages[m]
        ratio = np.exp(policy[m, target] - terms.old_log_probs[m])
        if not clip_min <= ratio <= clip_max:
            continue
        free, bound = ratio * advantage, np.clip(ratio, 1 - epsilon, 1 + epsilon_high) * advantage
        values[m] = -min(free, bound)
        if free <= bound:
            gradients[m] = -free * score(policy[m], target)
    return values, gradients

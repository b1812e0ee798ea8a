"""The loss interface, and what several losses share: the importance ratio with its guards, and the clip metrics.

A loss is a plain function on JAX arrays, traced inside the train step::

    def loss(logps, old_logps, advantages, extras):
        ratio = jnp.exp(logps - old_logps)
        return -ratio * advantages, {"my/ratio_max": ratio}

All arrays hold M loss terms of one row, padding included (``extras.mask`` tells). The step sums the per-token loss
over the terms of the mask and divides by the number of trained tokens of the whole step; it reduces each metric over
the same terms, to a mean, or to the largest or smallest value where the name's last part says ``max`` or ``min``.
A padded term may hold anything finite; the loss must not turn it into NaN, neither in value nor in gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ajgrpo.errors import ConfigError

Array = jax.Array
LossMetrics = dict[str, Array]

MAX_LOG_RATIO = 60.0
"""Log-ratios are cut off here before exp: e^60 ≈ 1e26 lies far outside every window, and its float32 mean is finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossExtras:
    """What a loss may read besides log-probs and advantages. M loss terms, K sampler log-probs for each.

    π is the trained policy, μ the sampler. Gradients flow through ``policy_top_log_probs`` and ``entropy`` (and the
    loss's own argument ``logps``), through nothing else.

    Attributes:
        mask: bool [M], False for padding.
        sample: int32 [M], which sample the term belongs to, counted from 0; below M.
        sampler_ids: int32 [M, K], the sampler's most likely tokens; -1 pads.
        policy_top_log_probs: float32 [M, K], log π at ``sampler_ids``; 0 where padded.
        sampler_log_probs: float32 [M, K], log μ at ``sampler_ids``; -inf where padded.
        entropy: float32 [M], of π's distribution at the term, in nats.
        versions: int32 [M], the policy version that sampled the token; -1 unknown.
    """

    mask: Array
    sample: Array
    sampler_ids: Array
    policy_top_log_probs: Array
    sampler_log_probs: Array
    entropy: Array
    versions: Array

    @property
    def num_samples(self) -> int:
        """Static bound of ``sample`` for segment sums: M, since every sample has a term."""
        return self.mask.shape[0]


LossFn = Callable[[Array, Array, Array, LossExtras], tuple[Array, LossMetrics]]
"""``(logps [M], old_logps [M], advantages [M], extras) -> (per_token_loss [M], {metric name: [M]})``, all float32."""


class Ratio(NamedTuple):
    """Importance ratios π/μ of some tokens.

    Attributes:
        inside: bool, whether the token is real and its ratio lies inside the window.
        kept: the ratio where inside, else 0; differentiable, with gradient ``ratio * ∇ log π`` inside and 0 outside.
        value: the ratio of every real token, before masking, without gradient; 1 for padding.
    """

    inside: Array
    kept: Array
    value: Array


def importance_ratio(
    log_probs: Array, sampler_log_probs: Array, valid: Array, *, clip_min: float, clip_max: float
) -> Ratio:
    """Importance ratios with the window of masked importance sampling; all arrays have one shape.

    A real token whose ratio has no meaning (an infinite or NaN log-prob on either side, such as a token outside its
    candidate set) counts as ratio 0, and is never inside.

    Args:
        log_probs: log π, float32.
        sampler_log_probs: log μ, float32.
        valid: bool, False for padding.
        clip_min: smallest ratio that is kept.
        clip_max: largest ratio that is kept.
    """
    defined = valid & jnp.isfinite(log_probs) & jnp.isfinite(sampler_log_probs)
    # Guard: where() passes the gradient 0 to the branch it does not take, and 0 * inf is NaN. So every exp below sees a
    # finite, bounded argument, and the differentiable one sees 0 wherever its result is not used.
    difference = jnp.where(defined, log_probs, 0.0) - jnp.where(defined, sampler_log_probs, 0.0)
    value = jnp.exp(lax.stop_gradient(jnp.minimum(difference, MAX_LOG_RATIO)))
    inside = defined & (value >= clip_min) & (value <= clip_max)
    kept = jnp.where(inside, jnp.exp(jnp.where(inside, difference, 0.0)), 0.0)
    return Ratio(inside, kept, jnp.where(defined, value, jnp.where(valid, 0.0, 1.0)))


def ratio_metrics(ratio: Ratio) -> LossMetrics:
    """Importance ratios before masking, and the fraction of trained tokens that the window drops."""
    return {
        "sampling/importance_sampling_ratio/min": ratio.value,
        "sampling/importance_sampling_ratio/mean": ratio.value,
        "sampling/importance_sampling_ratio/max": ratio.value,
        "sampling/masked_mean": 1.0 - ratio.inside.astype(jnp.float32),
    }


def clip_metrics(low: Array, high: Array, extras: LossExtras) -> LossMetrics:
    """Fractions of tokens beyond the trust region's bounds.

    The means are over tokens. ``low_min`` and ``high_max`` are the smallest and largest fraction of a sample: every
    token carries its sample's fraction, and the step's reduction does the rest.

    Args:
        low: bool [M], beyond the lower bound.
        high: bool [M], beyond the upper bound.
        extras: gives mask and samples.
    """
    return {
        "clip_ratio/region_mean": (low | high).astype(jnp.float32),
        "clip_ratio/low_mean": low.astype(jnp.float32),
        "clip_ratio/low_min": sample_fraction(low, extras),
        "clip_ratio/high_mean": high.astype(jnp.float32),
        "clip_ratio/high_max": sample_fraction(high, extras),
    }


def sample_fraction(flags: Array, extras: LossExtras) -> Array:
    """float32 [M]: for each term, the fraction of its sample's terms whose flag (bool [M]) is set."""

    def count(chosen: Array) -> Array:
        return jax.ops.segment_sum(chosen.astype(jnp.int32), extras.sample, num_segments=extras.num_samples)

    fractions = count(flags & extras.mask) / jnp.maximum(count(extras.mask), 1)
    return fractions.astype(jnp.float32)[extras.sample]


def checked(loss: LossFn, name: str) -> LossFn:
    """``loss`` with its results checked while tracing; for losses that users bring.

    Args:
        loss: the loss.
        name: what messages call it.

    Raises (when the returned function is traced):
        ConfigError: it does not return ``(per_token_loss [M], {str: [M]})``.
    """

    @functools.wraps(loss)
    def wrapper(logps: Array, old_logps: Array, advantages: Array, extras: LossExtras) -> tuple[Array, LossMetrics]:
        try:
            result = loss(logps, old_logps, advantages, extras)
        except Exception as exc:  # whatever user code raises is told with its name
            exc.add_note(f"raised by the loss {name}")
            raise
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise ConfigError(f"loss {name} must return (per_token_loss, metrics dict), got {type(result).__name__}")
        per_token, metrics = result
        for what, array in (("its per-token loss", per_token), *((f"metric {key!r}", x) for key, x in metrics.items())):
            if jnp.shape(array) != logps.shape:
                raise ConfigError(
                    f"loss {name} must return one value for each of the {logps.shape[0]} terms, but {what} has shape "
                    f"{jnp.shape(array)}; leave sums and means to the trainer"
                )
        return per_token, metrics

    return wrapper

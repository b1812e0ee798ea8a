"""The clipped surrogate of GRPO with masked importance sampling.

    -min( r · A, clip(r, 1 - ε_low, 1 + ε_high) · A )    where C_min ≤ r ≤ C_max, else 0

with r = π/μ. The minimum takes the clipped branch, which has no gradient, only where the update would leave the trust
region: above its upper bound for a positive advantage, below its lower bound for a negative one.
"""

from __future__ import annotations

import jax.numpy as jnp

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.losses.api import (
    Array,
    LossExtras,
    LossFn,
    LossMetrics,
    clip_metrics,
    importance_ratio,
    ratio_metrics,
)


def make(config: AsyncGRPOConfig) -> LossFn:
    """The clipped loss with the bounds of ``config``.

    Metrics: importance ratios, ``sampling/masked_mean``, and ``clip_ratio/*``: tokens whose ratio lies beyond the bound
    that the sign of their advantage makes binding, whether or not the window drops them too.
    """
    window = {
        "clip_min": config.vllm_importance_sampling_clip_min,
        "clip_max": config.vllm_importance_sampling_clip_max,
    }
    lower, upper = 1.0 - config.epsilon, 1.0 + config.upper_epsilon

    def clipped(logps: Array, old_logps: Array, advantages: Array, extras: LossExtras) -> tuple[Array, LossMetrics]:
        ratio = importance_ratio(logps, old_logps, extras.mask, **window)
        low = (ratio.value < lower) & (advantages < 0)
        high = (ratio.value > upper) & (advantages > 0)
        bounded = jnp.where(low, lower, jnp.where(high, upper, ratio.kept))
        loss = jnp.where(ratio.inside, -bounded * advantages, 0.0)
        return loss, {**ratio_metrics(ratio), **clip_metrics(low, high, extras)}

    return clipped

"""Score centering: the importance-weighted score of the sampled token, minus its expectation under the sampler.

With π the policy, μ the sampler, r = π/μ and f(r) = r inside [C_min, C_max] and 0 outside, the gradient is

    -A · ( f(r_t) ∇ log π(o_t) - Σ_v μ(v) f(r_v) ∇ log π(v) )

where v runs over the sampler's most likely tokens. Tokens that the sampler draws at random then push the policy nowhere
on average: under v ~ μ the bracket's expectation is 0 (exactly so when the sum covers all of μ).

Since ∇r = r ∇ log π, this is the gradient of the surrogate that the loss returns as its value,

    -A · ( f(r_t) - Σ_v μ(v) f(r_v) ),

in which r is differentiated inside the window. Its second part, Σ_v μ(v) f(r_v), is the policy's own probability of
those of the sampler's likely tokens that lie inside the window: on policy the value is -A times the probability that
the sum leaves out, so it is near 0 when the sum covers most of the sampler's mass.
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
    """The score-centering loss with the bounds of ``config``.

    Metrics: importance ratios, ``sampling/masked_mean``, ``sampling/sampler_mass`` (the sampler's probability of the
    tokens that the sum runs over), and ``clip_ratio/*``, which here counts tokens outside the trust region
    [1 - epsilon, 1 + epsilon_high]: this loss clips nothing.
    """
    window = {
        "clip_min": config.vllm_importance_sampling_clip_min,
        "clip_max": config.vllm_importance_sampling_clip_max,
    }
    lower, upper = 1.0 - config.epsilon, 1.0 + config.upper_epsilon

    def score_centering(
        logps: Array, old_logps: Array, advantages: Array, extras: LossExtras
    ) -> tuple[Array, LossMetrics]:
        ratio = importance_ratio(logps, old_logps, extras.mask, **window)
        valid = extras.mask[:, None] & (extras.sampler_ids >= 0) & jnp.isfinite(extras.sampler_log_probs)
        sampler = jnp.where(valid, jnp.exp(extras.sampler_log_probs), 0.0)
        likely = importance_ratio(extras.policy_top_log_probs, extras.sampler_log_probs, valid, **window)
        expected = (sampler * likely.kept).sum(-1)
        metrics = {
            **ratio_metrics(ratio),
            "sampling/sampler_mass": sampler.sum(-1),
            **clip_metrics(ratio.value < lower, ratio.value > upper, extras),
        }
        return -advantages * (ratio.kept - expected), metrics

    return score_centering

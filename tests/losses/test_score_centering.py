from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ajgrpo import config as configuration
from ajgrpo.losses import build_loss
from tests.losses import reference


def make(**options):
    return build_loss(configuration.AsyncGRPOConfig(score_centering=True, **options))


@pytest.mark.parametrize("window", [(0.5, 5.0), (0.9, 1.2), (0.0, 1e9)])
def test_value_and_gradient_equal_the_formula(window: tuple[float, float]):
    clip_min, clip_max = window
    loss = make(vllm_importance_sampling_clip_min=clip_min, vllm_importance_sampling_clip_max=clip_max)
    for seed in range(3):
        terms = reference.random_terms(seed)
        values, gradients, _ = reference.evaluate(loss, terms)
        expected_values, expected_gradients = reference.score_centering(terms, clip_min, clip_max)
        np.testing.assert_allclose(np.where(terms.mask, values, 0.0), expected_values, atol=3e-6)
        np.testing.assert_allclose(gradients, expected_gradients, atol=3e-6)
        np.testing.assert_array_equal(gradients[~terms.mask], 0.0)


def test_terms_outside_the_window_lose_only_their_own_part():
    """r_t outside: the sampled token's score goes, the expectation stays."""
    terms = reference.random_terms(3)
    terms.old_log_probs[:] = -50.0
    _, gradients, metrics = reference.evaluate(make(), terms)
    _, expected = reference.score_centering(terms, 0.5, 5.0)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(gradients, expected, atol=3e-6)
    np.testing.assert_array_equal(metrics["sampling/masked_mean"][terms.mask], 1.0)


@pytest.mark.parametrize("window", [(0.5, 5.0), (0.8, 1.1)])
def test_expectation_under_the_sampler_is_zero_when_the_sum_covers_the_vocabulary(window: tuple[float, float]):
    """One position; term v is the event that the sampler draws v, weighted by its probability through the advantage."""
    vocabulary = 7
    rng = np.random.default_rng(4)
    sampler = reference.log_softmax(rng.normal(size=vocabulary))
    policy = sampler + 0.5 * rng.normal(size=vocabulary)
    events = np.arange(vocabulary)
    terms = reference.Terms(
        logits=np.tile(policy, (vocabulary, 1)),
        targets=events,
        old_log_probs=sampler,
        advantages=np.exp(sampler),
        mask=np.ones(vocabulary, bool),
        sample=np.zeros(vocabulary, int),
        sampler_ids=np.tile(events, (vocabulary, 1)),
        sampler_log_probs=np.tile(sampler, (vocabulary, 1)),
    )
    loss = make(vllm_importance_sampling_clip_min=window[0], vllm_importance_sampling_clip_max=window[1])
    values, gradients, metrics = reference.evaluate(loss, terms)
    np.testing.assert_allclose(gradients.sum(0), 0.0, atol=1e-6)
    np.testing.assert_allclose(values.sum(), 0.0, atol=1e-6)
    np.testing.assert_allclose(metrics["sampling/sampler_mass"], 1.0, rtol=1e-6)
    uncentred = dataclasses.replace(terms, sampler_log_probs=np.full((vocabulary, vocabulary), -np.inf))
    assert np.abs(reference.evaluate(loss, uncentred)[1].sum(0)).max() > 0.01


def test_on_policy_value_is_the_uncovered_probability():
    terms = reference.random_terms(5, mismatch=0.0)
    values, _, metrics = reference.evaluate(make(), terms)
    mass = metrics["sampling/sampler_mass"]
    expected_mass = np.exp(terms.sampler_log_probs).sum(1)
    np.testing.assert_allclose(mass[terms.mask], expected_mass[terms.mask], rtol=1e-5)
    np.testing.assert_allclose(values[terms.mask], (-terms.advantages * (1 - expected_mass))[terms.mask], atol=2e-6)


def test_metrics_count_tokens_outside_the_trust_region_whatever_the_advantage():
    terms = reference.random_terms(6)
    _, _, metrics = reference.evaluate(make(epsilon=0.2, epsilon_high=0.3), terms)
    policy = reference.log_softmax(terms.logits)
    ratio = np.exp(policy[np.arange(len(terms.targets)), terms.targets] - terms.old_log_probs)
    real = terms.mask
    np.testing.assert_allclose(metrics["sampling/importance_sampling_ratio/mean"][real], ratio[real], rtol=1e-5)
    np.testing.assert_array_equal(metrics["sampling/masked_mean"][real], ((ratio < 0.5) | (ratio > 5.0))[real])
    np.testing.assert_array_equal(metrics["clip_ratio/low_mean"][real], (ratio < 0.8)[real])
    np.testing.assert_array_equal(metrics["clip_ratio/high_mean"][real], (ratio > 1.3)[real])
    np.testing.assert_array_equal(metrics["clip_ratio/region_mean"][real], ((ratio < 0.8) | (ratio > 1.3))[real])
    by_sample = [(ratio < 0.8)[real & (terms.sample == s)].mean() for s in range(5)]
    assert len(set(by_sample)) > 1
    np.testing.assert_allclose(metrics["clip_ratio/low_min"][real].min(), min(by_sample), rtol=1e-6)
    by_sample = [(ratio > 1.3)[real & (terms.sample == s)].mean() for s in range(5)]
    np.testing.assert_allclose(metrics["clip_ratio/high_max"][real].max(), max(by_sample), rtol=1e-6)


def test_no_sampler_log_probs_at_all():
    """K = 0 columns (a user's worker that reports none): the plain importance-weighted score."""
    terms = reference.random_terms(7)
    terms.sampler_ids, terms.sampler_log_probs = terms.sampler_ids[:, :0], terms.sampler_log_probs[:, :0]
    _, gradients, _ = reference.evaluate(make(), terms)
    np.testing.assert_allclose(gradients, reference.score_centering(terms, 0.5, 5.0)[1], atol=3e-6)

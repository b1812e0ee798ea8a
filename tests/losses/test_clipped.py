from __future__ import annotations

import numpy as np
import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.losses import build_loss
from tests.losses import reference


def make(**options):
    return build_loss(AsyncGRPOConfig(score_centering=False, **options))


def terms_with_ratios(ratios: list[float], advantages: list[float]) -> reference.Terms:
    """Real terms whose importance ratios are given."""
    terms = reference.random_terms(0, terms=len(ratios))
    policy = reference.log_softmax(terms.logits)
    terms.old_log_probs = policy[np.arange(len(ratios)), terms.targets] - np.log(ratios)
    terms.advantages, terms.mask = np.array(advantages), np.ones(len(ratios), bool)
    return terms


def test_values_of_both_signs_on_every_side_of_the_bounds():
    ratios = [0.4, 0.6, 1.0, 1.2, 2.0, 6.0]
    loss = make(epsilon=0.2, epsilon_high=0.3)
    good, _, _ = reference.evaluate(loss, terms_with_ratios(ratios, [2.0] * 6))
    np.testing.assert_allclose(good, [0.0, -1.2, -2.0, -2.4, -2.6, 0.0], rtol=1e-5)
    bad, _, _ = reference.evaluate(loss, terms_with_ratios(ratios, [-2.0] * 6))
    np.testing.assert_allclose(bad, [0.0, 1.6, 2.0, 2.4, 4.0, 0.0], rtol=1e-5)


def test_gradient_stops_where_the_bound_binds_or_the_window_masks():
    ratios = [0.4, 0.6, 1.0, 1.2, 2.0, 6.0]
    loss = make(epsilon=0.2, epsilon_high=0.3)
    for advantage, flows in ((2.0, [0, 1, 1, 1, 0, 0]), (-2.0, [0, 0, 1, 1, 1, 0])):
        _, gradients, _ = reference.evaluate(loss, terms_with_ratios(ratios, [advantage] * 6))
        np.testing.assert_array_equal(np.abs(gradients).max(1) > 0, flows)


@pytest.mark.parametrize("window", [(0.5, 5.0), (0.9, 1.2), (0.0, 1e9)])
def test_value_and_gradient_equal_the_formula(window: tuple[float, float]):
    clip_min, clip_max = window
    loss = make(
        epsilon=0.15,
        epsilon_high=0.28,
        vllm_importance_sampling_clip_min=clip_min,
        vllm_importance_sampling_clip_max=clip_max,
    )
    for seed in range(3):
        terms = reference.random_terms(seed)
        values, gradients, _ = reference.evaluate(loss, terms)
        expected_values, expected_gradients = reference.clipped(terms, clip_min, clip_max, 0.15, 0.28)
        np.testing.assert_allclose(np.where(terms.mask, values, 0.0), expected_values, atol=3e-6)
        np.testing.assert_allclose(gradients, expected_gradients, atol=3e-6)


def test_upper_bound_follows_epsilon_when_epsilon_high_is_unset():
    values, _, _ = reference.evaluate(make(epsilon=0.1), terms_with_ratios([2.0], [1.0]))
    np.testing.assert_allclose(values, [-1.1], rtol=1e-6)


def test_metrics_count_the_tokens_whose_bound_binds():
    ratios = [0.6, 0.6, 1.0, 2.0, 2.0, 6.0, 1.0, 0.6]
    advantages = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    terms = terms_with_ratios(ratios, advantages)
    terms.sample = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    _, _, metrics = reference.evaluate(make(), terms)
    np.testing.assert_array_equal(metrics["clip_ratio/low_mean"], [0, 1, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(metrics["clip_ratio/high_mean"], [0, 0, 0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_ratio/region_mean"], [0, 1, 0, 1, 0, 1, 0, 1])
    np.testing.assert_allclose(metrics["clip_ratio/low_min"], 0.25)
    np.testing.assert_allclose(metrics["clip_ratio/high_max"], 0.25)
    np.testing.assert_array_equal(metrics["sampling/masked_mean"], [0, 0, 0, 0, 0, 1, 0, 0])
    for name in ("min", "mean", "max"):
        np.testing.assert_allclose(metrics[f"sampling/importance_sampling_ratio/{name}"], ratios, rtol=1e-5)
    assert "sampling/sampler_mass" not in metrics

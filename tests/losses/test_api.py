from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError
from ajgrpo.losses import LossExtras, build_loss, checked
from ajgrpo.losses.api import importance_ratio, sample_fraction
from ajgrpo.metrics import reduction
from tests.losses import reference


def extras(terms: int, **changes) -> LossExtras:
    values = {
        "mask": jnp.ones(terms, bool),
        "sample": jnp.zeros(terms, jnp.int32),
        "sampler_ids": jnp.zeros((terms, 2), jnp.int32),
        "policy_top_log_probs": jnp.full((terms, 2), -1.0),
        "sampler_log_probs": jnp.full((terms, 2), -1.0),
        "entropy": jnp.ones(terms),
        "versions": jnp.zeros(terms, jnp.int32),
    }
    return LossExtras(**(values | changes))


def test_extras_is_a_pytree_of_its_arrays():
    leaves, structure = jax.tree.flatten(extras(3))
    assert len(leaves) == 7
    assert jax.tree.unflatten(structure, leaves).num_samples == 3


def test_importance_ratio_by_hand():
    policy = jnp.log(jnp.array([0.5, 0.2, 0.1, 0.5]))
    sampler = jnp.log(jnp.array([0.4, 0.5, 0.01, 0.5]))
    valid = jnp.array([True, True, True, False])
    ratio = importance_ratio(policy, sampler, valid, clip_min=0.5, clip_max=5.0)
    np.testing.assert_array_equal(ratio.inside, [True, False, False, False])
    np.testing.assert_allclose(ratio.kept, [1.25, 0.0, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(ratio.value, [1.25, 0.4, 10.0, 1.0], rtol=1e-6)


def test_a_ratio_at_a_bound_is_kept():
    log_ratio = jnp.log(jnp.array([0.5, 2.0]))
    ratio = importance_ratio(log_ratio, jnp.zeros(2), jnp.ones(2, bool), clip_min=0.5, clip_max=2.0)
    np.testing.assert_array_equal(ratio.inside, True)


WILD = {
    "policy -inf (outside its candidates)": (-np.inf, -1.0),
    "sampler -inf": (-1.0, -np.inf),
    "both -inf": (-np.inf, -np.inf),
    "sampler NaN": (-1.0, np.nan),
    "policy NaN": (np.nan, -1.0),
    "ratio overflows": (-0.1, -5000.0),
    "ratio underflows": (-5000.0, -0.1),
}


@pytest.mark.parametrize("score_centering", [True, False])
@pytest.mark.parametrize("real", [True, False], ids=["real", "pad"])
@pytest.mark.parametrize("case", WILD)
def test_wild_log_probs_give_finite_values_and_no_gradient(case: str, real: bool, score_centering: bool):
    """Term 1 is wild in the sampled token and in the first sampler token; term 0 is healthy throughout."""
    policy, sampler = WILD[case]
    loss = build_loss(AsyncGRPOConfig(score_centering=score_centering))

    def total(log_probs, top):
        inputs = extras(
            2,
            mask=jnp.array([True, real]),
            policy_top_log_probs=top,
            sampler_log_probs=jnp.array([[-1.0, -1.1], [sampler, -1.1]], jnp.float32),
        )
        per_token, metrics = loss(log_probs, jnp.array([-1.0, sampler]), jnp.array([1.0, -2.0]), inputs)
        return per_token.sum(), (per_token, metrics)

    log_probs = jnp.array([-0.9, policy], jnp.float32)
    top = jnp.array([[-0.9, -1.0], [policy, -1.0]], jnp.float32)
    gradients, (per_token, metrics) = jax.grad(total, argnums=(0, 1), has_aux=True)(log_probs, top)
    for array in (per_token, *metrics.values(), *gradients):
        assert np.isfinite(array).all()
    healthy = np.exp(0.1)
    np.testing.assert_allclose(gradients[0], [-healthy, 0.0], rtol=1e-5)
    if score_centering:
        mass = np.exp([-0.9, -1.0])
        np.testing.assert_allclose(gradients[1], [mass, [0.0, -2.0 * mass[1] * real]], rtol=1e-5)


@pytest.mark.parametrize("padding", [-np.inf, -1.0])
def test_pads_of_sampler_ids_are_ignored(padding: float):
    loss = build_loss(AsyncGRPOConfig())
    ids = jnp.array([[3, -1]], jnp.int32)

    def total(top):
        sampler = jnp.array([[-1.0, padding]], jnp.float32)
        padded = extras(1, sampler_ids=ids, policy_top_log_probs=top, sampler_log_probs=sampler)
        return loss(jnp.array([-1.0]), jnp.array([-1.0]), jnp.array([1.0]), padded)[0].sum()

    value, gradient = jax.value_and_grad(total)(jnp.array([[-1.0, 0.0]]))
    np.testing.assert_allclose(value, -(1 - np.exp(-1.0)), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[np.exp(-1.0), 0.0]], rtol=1e-6)


def test_sample_fraction_ignores_padding_and_absent_samples():
    flags = jnp.array([True, False, True, True, True, True])
    inputs = extras(
        6,
        mask=jnp.array([True, True, True, True, False, False]),
        sample=jnp.array([0, 0, 2, 2, 0, 5], jnp.int32),
    )
    np.testing.assert_allclose(sample_fraction(flags, inputs)[:4], [0.5, 0.5, 1.0, 1.0])
    assert np.isfinite(sample_fraction(flags, inputs)).all()


def test_metric_names_carry_their_reduction():
    terms = reference.random_terms(0)
    for score_centering in (True, False):
        loss = build_loss(AsyncGRPOConfig(score_centering=score_centering))
        metrics = reference.evaluate(loss, terms)[2]
        expected = {
            "sampling/importance_sampling_ratio/min": "min",
            "sampling/importance_sampling_ratio/mean": "mean",
            "sampling/importance_sampling_ratio/max": "max",
            "sampling/masked_mean": "mean",
            "clip_ratio/region_mean": "mean",
            "clip_ratio/low_mean": "mean",
            "clip_ratio/low_min": "min",
            "clip_ratio/high_mean": "mean",
            "clip_ratio/high_max": "max",
        } | ({"sampling/sampler_mass": "mean"} if score_centering else {})
        assert {name: reduction(name) for name in metrics} == expected
        assert all(x.shape == terms.mask.shape and x.dtype == np.float32 for x in metrics.values())


def test_checked_passes_a_sound_loss_through():
    loss = checked(lambda logps, old, advantages, extras: (logps * advantages, {"x": old}), "mine")
    per_token, metrics = loss(jnp.array([2.0]), jnp.array([3.0]), jnp.array([5.0]), extras(1))
    np.testing.assert_array_equal(per_token, [10.0])
    np.testing.assert_array_equal(metrics["x"], [3.0])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x, "loss mine must return"),
        (lambda x: (x.sum(), {}), r"2 terms, but its per-token loss has shape \(\)"),
        (lambda x: (x, {"a": x.mean()}), r"metric 'a' has shape \(\)"),
    ],
)
def test_checked_refuses_other_results(result, message: str):
    loss = checked(lambda logps, old, advantages, extras: result(logps), "mine")
    with pytest.raises(ConfigError, match=message):
        loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), extras(2))


def test_what_a_loss_raises_names_it():
    def broken(logps, old, advantages, extras):
        raise KeyError("temperature")

    with pytest.raises(KeyError) as caught:
        checked(broken, "my.broken")(None, None, None, None)
    assert caught.value.__notes__ == ["raised by the loss my.broken"]

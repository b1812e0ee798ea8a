from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError
from ajgrpo.losses import BUILT_IN, build_loss
from tests.losses import reference


def values(**options) -> np.ndarray:
    return reference.evaluate(build_loss(AsyncGRPOConfig(**options)), reference.random_terms(1))[0]


def test_the_flag_picks_the_loss_unless_a_name_does():
    centred, clipped = values(score_centering=True), values(score_centering=False)
    assert np.abs(centred - clipped).max() > 0.1
    np.testing.assert_array_equal(values(loss="score_centering", score_centering=False), centred)
    np.testing.assert_array_equal(values(loss="clipped", score_centering=True), clipped)


def test_built_in_names():
    assert list(BUILT_IN) == ["score_centering", "clipped"]


def test_an_imported_loss_is_used_as_it_is():
    loss = build_loss(AsyncGRPOConfig(loss="tests.losses.custom.reinforce"))
    per_token, metrics = loss(jnp.array([-2.0]), jnp.array([-3.0]), jnp.array([4.0]), None)
    np.testing.assert_array_equal(per_token, [8.0])
    np.testing.assert_array_equal(metrics["mine/gap"], [1.0])


def test_an_imported_loss_of_the_wrong_shape_is_refused_by_name():
    loss = build_loss(AsyncGRPOConfig(loss="tests.losses.custom.averaged"))
    with pytest.raises(ConfigError, match=r"tests\.losses\.custom\.averaged must return one value for each of the 2"):
        loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), None)


@pytest.mark.parametrize(
    ("name", "nearest", "reason"),
    [
        ("cliped", "clipped", "must be written module.name"),
        ("score_centring", "score_centering", "must be written module.name"),
        ("tests.losses.custom.missing", "", "has no 'missing'"),
        ("tests.nowhere.clipped", "clipped", "No module named 'tests.nowhere'"),
        ("tests.losses.custom.NOT_A_FUNCTION", "", "must be a function, got a float"),
    ],
)
def test_unusable_names_say_why_and_what_is_near(name: str, nearest: str, reason: str):
    with pytest.raises(ConfigError) as failure:
        build_loss(AsyncGRPOConfig(loss=name))
    message = str(failure.value)
    assert repr(name) in message
    assert reason in message
    assert f"the nearest is '{nearest}" in message


def test_score_centering_by_name_needs_sampler_log_probs():
    with pytest.raises(ConfigError, match="needs num_sampler_logprobs ≥ 1"):
        build_loss(AsyncGRPOConfig(loss="score_centering", num_sampler_logprobs=0))

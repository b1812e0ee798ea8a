"""The modules by hand: values, biases, and where float32 is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ajgrpo.models.layers import MLP, Linear, RMSNorm
from tests.models.reference import model_config


def test_linear_multiplies_from_the_left_and_adds_its_bias() -> None:
    linear = Linear(("embed", 2), ("mlp", 3), bias=True, std=0.02, rngs=nnx.Rngs(0))
    linear.kernel[...] = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    linear.bias[...] = jnp.array([0.5, 0.0, -0.5])
    np.testing.assert_array_equal(linear(jnp.array([[1.0, 1.0], [2.0, 0.0]])), [[11.5, 22.0, 32.5], [2.5, 4.0, 5.5]])


def test_rms_norm_by_hand() -> None:
    norm = RMSNorm(("embed", 2), eps=0.5, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.array([1.0, 2.0])
    # Mean square 12.5, plus eps 13.
    np.testing.assert_allclose(norm(jnp.array([[3.0, 4.0]])), [[3 / 13**0.5, 8 / 13**0.5]], rtol=1e-6)


def test_rms_norm_computes_in_float32_and_rounds_once() -> None:
    size = 512
    norm = RMSNorm(("embed", size), eps=1e-6, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, size)), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean() + 1e-6)
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    # Half a unit in the last place of 8 bits, and float32's own error.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8 + 1e-5)


def test_mlp_gates_with_silu() -> None:
    config = model_config(hidden_size=1, intermediate_size=1, head_dim=2)
    mlp = MLP(config, rngs=nnx.Rngs(0))
    for linear, weight in ((mlp.gate, 2.0), (mlp.up, 3.0), (mlp.down, 5.0)):
        linear.kernel[...] = jnp.array([[weight]])
    np.testing.assert_allclose(mlp(jnp.array([[0.5]])), [[5.0 * float(jax.nn.silu(1.0)) * 1.5]], rtol=1e-6)

"""The decoder against transformers' PyTorch models: logits and the gradient of every parameter, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.hf.mapping import assemble, flatten
from ajgrpo.models.config import ModelConfig
from ajgrpo.models.decoder import Params
from tests.models import reference

NUM_TOKENS = 40
"""Longer than ``reference.MAX_POSITIONS``, so that scalings that depend on the length set in."""


def compare(hf_config: dict, num_tokens: int, seed: int) -> None:
    import torch

    config = ModelConfig.from_hf(hf_config)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, num_tokens)
    weights = rng.standard_normal((num_tokens, config.vocab_size)).astype(np.float32)

    model = reference.torch_model(hf_config, seed)
    expected = model(torch.tensor(tokens)[None]).logits[0]
    (expected * torch.tensor(weights)).sum().backward()
    params = assemble(config, reference.numpy_tensors(model), "float32")
    gradients = assemble(config, reference.numpy_gradients(model), "float32")

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            logits = reference.sequence_logits(config, params, tokens, remat=True)
            return (logits * weights).sum(), logits

        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, grads

    logits, grads = run(params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-4, rtol=0)
    for path, gradient in flatten(gradients).items():
        scale = np.abs(gradient).max()
        assert scale > 0, path
        np.testing.assert_allclose(flatten(grads)[path] / scale, gradient / scale, atol=1e-4, rtol=0, err_msg=str(path))


@pytest.mark.reference
@pytest.mark.parametrize("seed", range(reference.NUM_SEEDS))
@pytest.mark.parametrize("family", reference.FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str, seed: int) -> None:
    compare(reference.random_hf_config(family, seed), NUM_TOKENS, seed)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_follow_the_length_equal_transformers_for_short_sequences(kind: str) -> None:
    rope = reference.rope_parameters(kind, 8, np.random.default_rng(0))
    compare(reference.hf_config(rope_parameters=rope), 12, seed=3)

"""Schedules against their formulas, AdamW against a plain NumPy statement."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.training.optimizer import build_optimizer, is_matrix, learning_rate_schedule


def test_schedules_follow_their_formulas() -> None:
    def rate(step: int, **options: object) -> float:
        return float(learning_rate_schedule(AsyncGRPOConfig(learning_rate=0.5, **options))(step))  # type: ignore[arg-type]

    assert [rate(step) for step in (0, 9)] == [0.5, 0.5]
    warm = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    assert [rate(step, **warm) for step in (0, 1, 4, 100)] == pytest.approx([0.0, 0.125, 0.5, 0.5])
    linear = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 12}
    assert [rate(step, **linear) for step in (0, 2, 7, 12)] == pytest.approx([0.0, 0.5, 0.25, 0.0])
    cosine = {"lr_scheduler_type": "cosine", "max_steps": 8}
    expected = [0.25 * (1 + math.cos(math.pi * step / 8)) for step in (0, 2, 8)]
    assert [rate(step, **cosine) for step in (0, 2, 8)] == pytest.approx(expected, abs=1e-7)


def test_weight_decay_is_for_matrices() -> None:
    assert is_matrix(("vocab", "embed"))
    assert is_matrix(("layers", "embed", "mlp"))
    assert not is_matrix(("layers", "embed"))
    assert not is_matrix(("embed",))


def test_adamw_equals_a_numpy_statement() -> None:
    config = AsyncGRPOConfig(
        learning_rate=0.1, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, max_grad_norm=1.0
    )
    axes = {"matrix": ("embed", "mlp"), "scale": ("embed",)}
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(3, 2)), "scale": rng.normal(size=3)}
    optimizer = build_optimizer(config, axes)
    values = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    state = optimizer.init(values)
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(1, 4):
        gradients = {name: rng.normal(size=value.shape) for name, value in params.items()}
        updates, state = optimizer.update({k: jnp.asarray(v, jnp.float32) for k, v in gradients.items()}, state, values)
        values = {name: values[name] + updates[name] for name in values}
        norm = math.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        for name in params:
            gradient = gradients[name] / max(norm, 1.0)
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            adam = first[name] / (1 - 0.8**step) / (np.sqrt(second[name] / (1 - 0.9**step)) + 1e-3)
            decay = 0.2 * params[name] if name == "matrix" else 0.0
            params[name] = params[name] - 0.1 * (adam + decay)
    for name in params:
        np.testing.assert_allclose(values[name], params[name], atol=1e-5)  # float32 against float64

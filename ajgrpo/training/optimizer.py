"""The optimizer and its learning-rate schedule, from the configuration, out of optax's parts."""

from __future__ import annotations

from typing import Any

import jax
import optax

from ajgrpo.config import AsyncGRPOConfig


def learning_rate_schedule(config: AsyncGRPOConfig) -> optax.Schedule:
    """Optimizer step (0-based) → learning rate.

    Warm-up rises linearly from 0 at step 0 to the peak at ``warmup_steps``; ``linear`` and ``cosine`` then fall to 0 at
    ``max_steps``.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    decay_steps = max(config.max_steps - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "constant_with_warmup": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps),
    }[config.lr_scheduler_type]
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def is_matrix(logical_axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix (weight decay applies), from its logical axes: biases and norm scales are not."""
    return len([axis for axis in logical_axes if axis != "layers"]) >= 2


def build_optimizer(config: AsyncGRPOConfig, logical_axes: Any) -> optax.GradientTransformation:
    """Gradient clipping by global norm, then the optimizer that ``config.optim`` names.

    Args:
        config: uses ``optim``, ``learning_rate``, the schedule, ``adam_*``, ``weight_decay`` and ``max_grad_norm``.
        logical_axes: pytree like the parameters with tuples of logical axis names (``models.decoder``).
    """
    schedule = learning_rate_schedule(config)
    decayed = jax.tree.map(is_matrix, logical_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    betas = {"b1": config.adam_beta1, "b2": config.adam_beta2}
    decay: dict[str, Any] = {"weight_decay": config.weight_decay, "mask": decayed}
    if config.optim == "adamw":
        update = optax.adamw(schedule, eps=config.adam_epsilon, **betas, **decay)
    elif config.optim == "lion":
        update = optax.lion(schedule, **betas, **decay)
    elif config.optim == "adam":
        update = optax.adam(schedule, eps=config.adam_epsilon, **betas)
    elif config.optim == "sgd":
        update = optax.sgd(schedule)
    else:
        update = optax.adafactor(schedule, weight_decay_rate=config.weight_decay or None, weight_decay_mask=decayed)
    if config.max_grad_norm > 0:
        return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), update)
    return update

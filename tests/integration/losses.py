"""A loss of the user's own that turns bad in the middle of a run."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def careless_loss(logps: Any, old_logps: Any, advantages: Any, extras: Any) -> Any:
    """The logarithm of a difference that has either sign: not a number sooner or later."""
    return jnp.log(old_logps - logps), {}

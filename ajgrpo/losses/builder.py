"""Picks the loss that a configuration names: a built-in one, or a function imported from the user's code."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.errors import ConfigError
from ajgrpo.imports import import_object
from ajgrpo.losses import clipped, score_centering
from ajgrpo.losses.api import LossFn, checked

BUILT_IN: dict[str, Callable[[AsyncGRPOConfig], LossFn]] = {
    "score_centering": score_centering.make,
    "clipped": clipped.make,
}


def loss_name(config: AsyncGRPOConfig) -> str:
    """The loss that ``config.loss`` names, else score centering or clipped by its flag."""
    return config.loss or ("score_centering" if config.score_centering else "clipped")


def build_loss(config: AsyncGRPOConfig) -> LossFn:
    """The loss of ``config``.

    Raises:
        ConfigError: the name is neither built in nor a function that can be imported, or score centering is asked for
            without sampler log-probs.
    """
    name = loss_name(config)
    if name not in BUILT_IN:
        return checked(_imported(name), name)
    if name == "score_centering" and config.num_sampler_logprobs < 1:
        raise ConfigError("loss 'score_centering' needs num_sampler_logprobs ≥ 1, got 0; raise it or use 'clipped'")
    return BUILT_IN[name](config)


def _imported(name: str) -> LossFn:
    nearest = difflib.get_close_matches(name.rsplit(".", 1)[-1], BUILT_IN, n=1, cutoff=0.0)[0]
    built_in = f"the built-in losses are {', '.join(BUILT_IN)}, the nearest is {nearest!r}"
    try:
        loss = import_object(name, "loss")
    except ConfigError as exc:
        raise ConfigError(f"{exc}; {built_in}") from exc
    if not callable(loss):
        raise ConfigError(f"loss {name!r} must be a function, got a {type(loss).__name__}; {built_in}")
    return loss

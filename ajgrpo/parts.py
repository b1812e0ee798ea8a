"""From names to objects: imports and loads what the keys of a ``RunConfig`` name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ajgrpo.cli import RunConfig
from ajgrpo.data import load_train_dataset
from ajgrpo.errors import ConfigError
from ajgrpo.imports import import_object, nearest

ASSETS = Path(__file__).parent / "assets"
BUILTIN = "builtin:"


def model_source(name: str) -> str:
    """What the trainer is given as ``model``: a directory for ``builtin:NAME``, else ``name`` itself.

    Raises:
        ConfigError: no such built-in model.
    """
    if not name.startswith(BUILTIN):
        return name
    models = {path.parent.name.replace("_", "-"): path.parent for path in sorted(ASSETS.glob("*/config.json"))}
    short = name.removeprefix(BUILTIN)
    if short not in models:
        known = ", ".join(BUILTIN + model for model in models) or "none"
        raise ConfigError(f"model {name!r} is unknown; the built-in models are: {known}")
    return str(models[short])


def reward_function(name: str) -> Callable[..., Any]:
    """The reward function that ``name`` names: one of ``ajgrpo.rewards``, or ``module.function``.

    Raises:
        ConfigError: it cannot be found, or is not callable.
    """
    if "." not in name:
        rewards = importlib.import_module("ajgrpo.rewards")
        functions = inspect.getmembers(rewards, inspect.isfunction)
        known = [key for key, value in functions if "completions" in inspect.signature(value).parameters]
        if name not in known:
            raise ConfigError(
                f"reward function {name!r} is not in ajgrpo.rewards{nearest(name, known)}; a function of your own is "
                "written module.function"
            )
        return _callable(f"ajgrpo.rewards.{name}", "reward function")
    return _callable(name, "reward function")


def _callable(name: str, what: str) -> Callable[..., Any]:
    found = import_object(name, what)
    if not callable(found):
        raise ConfigError(f"{what} {name!r} must be callable, got {type(found).__name__}")
    return found


def environment_factory(named: str | dict[str, str] | None) -> Any:
    """The factory, the mapping of names to factories, or None."""
    if isinstance(named, dict):
        return {key: _callable(name, f"environment {key!r}") for key, name in named.items()}
    return None if named is None else _callable(named, "environment factory")


def tools(run: RunConfig) -> list[Callable[..., Any]]:
    """The tool functions."""
    return [_callable(name, "tool") for name in run.tools]


def callbacks(run: RunConfig) -> list[Any]:
    """The callbacks: classes or instances."""
    return [import_object(name, "callback") for name in run.callbacks]


def trainer_class(run: RunConfig) -> Any:
    """The trainer's class (imports jax)."""
    return _callable(run.trainer, "trainer")


def trainer_arguments(run: RunConfig) -> dict[str, Any]:
    """The keyword arguments of the trainer's class.

    Raises:
        AjgrpoError: of the first part that cannot be made.
    """
    return {
        "model": model_source(run.model),
        "reward_funcs": [reward_function(name) for name in run.reward_funcs] or None,
        "args": run.training,
        "train_dataset": dataset(run),
        "callbacks": callbacks(run) or None,
        "tools": tools(run) or None,
        "environment_factory": environment_factory(run.environment_factory),
    }


def dataset(run: RunConfig) -> Any:
    """The loaded training dataset, or None when an environment gives the prompts."""
    if run.dataset is None:
        return None
    return load_train_dataset(run.dataset, split=run.dataset_split, name=run.dataset_name, kwargs=run.dataset_kwargs)

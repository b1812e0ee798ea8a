"""Objects named by text: ``module.attribute`` from a configuration becomes the object itself."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from typing import Any

from ajgrpo.errors import ConfigError

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def is_dotted_name(text: str) -> bool:
    """Whether ``text`` has the form ``module.attribute`` (packages before it as needed)."""
    return _DOTTED.fullmatch(text) is not None


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the most similar known name, or an empty string when none is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def import_object(name: str, what: str) -> Any:
    """The object that ``name`` (``module.attribute``) names.

    Args:
        name: for example ``"my_module.my_reward"``.
        what: what it is, for the message, for example ``"reward function"``.

    Raises:
        ConfigError: when the name has another form, or the module or its attribute is not found.
    """
    if not is_dotted_name(name):
        raise ConfigError(f"{what} must be written module.name (for example my_module.my_object), got {name!r}")
    module_name, attribute = name.rsplit(".", 1)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{what} {name!r}: cannot import {module_name!r}: {error}") from error
    if attribute not in vars(module) and attribute not in dir(module):
        raise ConfigError(f"{what} {name!r}: {module_name!r} has no {attribute!r}{nearest(attribute, dir(module))}")
    return getattr(module, attribute)

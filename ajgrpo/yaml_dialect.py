"""YAML as people expect it: the scalars of YAML 1.2 on top of PyYAML, which reads YAML 1.1.

``1e-6`` is a float (1.1: text), ``no`` and ``on`` are text (1.1: booleans), ``2026-01-01`` and ``12:30`` are text
(1.1: a date, a sexagesimal number). A key that stands twice in a mapping is an error (PyYAML: the last one wins).
``dump`` writes what ``load`` reads back as the same values.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
"""Tag, pattern, and the characters that a scalar of it may start with (``\\0``: the empty scalar)."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (PyYAML's own class attribute, emptied)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _characters = ["" if character == "\0" else character for character in _first]
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _characters)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))  # YAML 1.1 reads 010 as octal


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            mark = node.value[index][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def load(text: str) -> Any:
    """The value that ``text`` holds.

    Raises:
        yaml.YAMLError: when it is not YAML, or a key stands twice.
    """
    return yaml.load(text, _Loader)


def dump(values: dict[str, Any]) -> str:
    """``values`` as YAML, one key a line, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def inline(value: Any) -> str:
    """``value`` on one line, as it can be given on the command line."""
    return (
        yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=1 << 30)
        .removesuffix("\n")
        .removesuffix("\n...")
    )

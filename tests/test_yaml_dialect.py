import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ajgrpo.yaml_dialect import dump, inline, load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E6", 1e6), ("-.5", -0.5), ("5.", 5.0), (".inf", math.inf), ("1.5e+3", 1500.0),
        ("10", 10), ("-1", -1), ("010", 10), ("1_000", 1000), ("0x10", "0x10"),
        ("true", True), ("False", False), ("no", "no"), ("on", "on"), ("y", "y"),
        ("null", None), ("~", None), ("", None), ("none", "none"),
        ("2026-01-01", "2026-01-01"), ("12:30", "12:30"), ("'1e-6'", "1e-6"), ("e5", "e5"), ("1e", "1e"),
        ("{a: 1e-6, b: [no, 2]}", {"a": 1e-6, "b": ["no", 2]}),
    ],
)  # fmt: skip
def test_scalars(text, value):
    loaded = load(text)
    assert loaded == value
    assert type(loaded) is type(value)


def test_a_key_that_stands_twice_is_refused_at_any_depth():
    for text in ("a: 1\nb: 2\na: 3", "m: {a: 1, a: 1}"):
        with pytest.raises(yaml.YAMLError, match="the key 'a' stands twice"):
            load(text)


def test_anchors_and_merges_are_not_objects():
    with pytest.raises(yaml.YAMLError):
        load("!!python/object/apply:os.getcwd []")


TRICKY = ["no", "on", "1e-6", "1_0", "010", "null", "~", "", "true", "2026-01-01", "12:30", ".inf", "=", "<<"]
texts = st.text(st.characters(codec="ascii"), max_size=8) | st.sampled_from(TRICKY)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
keys = st.text("ab", max_size=2)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(st.text("abc_", min_size=1, max_size=5), values, max_size=4))
def test_what_is_dumped_loads_as_the_same_values(mapping):
    loaded = load(dump(mapping))
    assert loaded == mapping
    assert repr(loaded) == repr(mapping)  # also the types: 1 and 1.0 and True differ


def test_inline_is_one_line():
    assert inline({"data": 1, "fsdp": -1}) == "{data: 1, fsdp: -1}"
    assert [inline(value) for value in (None, 1e-6, True, [], "no")] == ["null", "1.0e-06", "true", "[]", "no"]

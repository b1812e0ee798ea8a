import sys

import pytest

from ajgrpo.errors import ConfigError
from ajgrpo.imports import import_object, is_dotted_name, nearest


@pytest.mark.parametrize(
    ("text", "dotted"),
    [("a.b", True), ("a.b.c_1", True), ("a", False), ("a/b.c", False), ("a.", False), (".a", False), ("1.a", False)],
)
def test_is_dotted_name(text, dotted):
    assert is_dotted_name(text) is dotted


def test_the_object_itself_comes_back():
    assert import_object("ajgrpo.errors.ConfigError", "class") is ConfigError
    assert import_object("os.path.join", "function") is __import__("os").path.join


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my reward", "reward function must be written module.name (for example my_module.my_object), got 'my reward'"),
        ("absent_module.f", "reward function 'absent_module.f': cannot import 'absent_module': No module named"),
        ("ajgrpo.errors.ConfigEror", "'ajgrpo.errors' has no 'ConfigEror'; did you mean 'ConfigError'?"),
    ],
)
def test_what_is_not_found_is_named(name, message):
    with pytest.raises(ConfigError) as caught:
        import_object(name, "reward function")
    assert message in str(caught.value)


@pytest.mark.parametrize("source", ["import absent_dependency", "from os import absent_name"])
def test_an_import_that_fails_inside_the_module_is_shown(tmp_path, monkeypatch, source):
    (tmp_path / "broken_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot import 'broken_module': .*absent_"):
        import_object("broken_module.f", "reward function")
    assert "broken_module" not in sys.modules


def test_nearest():
    assert nearest("learnig_rate", ["seed", "learning_rate"]) == "; did you mean 'learning_rate'?"
    assert nearest("zzz", ["seed"]) == ""

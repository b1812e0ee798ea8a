import inspect
import re

import pytest

from ajgrpo import errors


def exceptions():
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }


def test_the_drawing_in_the_docstring_is_the_tree():
    """Every exception is drawn once, at the depth that its base classes give it."""
    drawn = {}
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^ {4}([│├└─ ]*)(\w+Error)\b", line):
            drawn[match[2]] = len(match[1]) // 4
    depth = {name: value.__mro__.index(errors.AjgrpoError) for name, value in exceptions().items()}
    assert drawn == depth


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(errors.ConfigError, ValueError), (errors.DatasetError, ValueError), (errors.PicklingError, TypeError)],
)
def test_errors_of_the_callers_making_are_also_builtin_errors(error, builtin):
    with pytest.raises(builtin):
        raise error("text")


def test_a_config_error_lists_its_violations():
    assert str(errors.ConfigError("one")) == "one"
    assert str(errors.ConfigError(["one"])) == "one"
    error = errors.ConfigError(["one", "two"])
    assert error.violations == ("one", "two")
    assert str(error) == "2 configuration errors:\n  - one\n  - two"


def test_a_key_mismatch_shows_all_kinds_of_problems():
    error = errors.KeyMismatchError("dir", missing=["a", "b"], misshaped=["c: expected (4, 8), found (8, 4)"])
    assert str(error) == (
        "the tensors of dir do not match the model\n"
        "  missing (2): a, b\n"
        "  misshaped (1): c: expected (4, 8), found (8, 4)"
    )
    assert (error.missing, error.unexpected) == (("a", "b"), ())


def test_structured_errors_keep_their_parts():
    response = errors.ServerResponseError("POST /pause", 500, "busy")
    assert (response.status, str(response)) == (500, "POST /pause answered 500: busy")
    transfer = errors.WeightTransferError("update", "the peer left")
    assert (transfer.phase, str(transfer)) == ("update", "weight transfer failed in phase 'update': the peer left")

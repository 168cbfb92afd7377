"""An InputError's line is made of its parts."""

from pathlib import Path

import pytest
from refusals import refused

from peagle.errors import InputError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("must be at least 1", field="k", value=0), "k 0: must be at least 1"),
        (InputError("is not known", field="device", value="x"), "device 'x': is not known"),
        (InputError("is empty", field="stop", value=""), "stop '': is empty"),
        (InputError("no such file", field="data", value=Path("a")), "data a: no such file"),
        (InputError("too big", field="k", value=9, fix="lower it"), "k 9: too big; lower it"),
        (InputError("no answers", fix="make some"), "no answers; make some"),
        (InputError("is missing", field="target"), "target: is missing"),
    ],
)
def test_a_line_names_field_value_and_fix(error: InputError, line: str) -> None:
    assert str(error) == line
    if error.field is not None:
        assert error.named("--its-name") == line.replace(error.field, "--its-name", 1)


def test_a_long_value_is_shortened_but_a_path() -> None:
    assert len(str(InputError("is wrong", field="x", value="y" * 999))) < 90
    path = Path("/very/long" * 20, "y" * 99)
    assert str(InputError("is wrong", field="x", value=path)) == f"x {path}: is wrong"


def test_refused_compares_the_field() -> None:
    with pytest.raises(AssertionError), refused("k"):
        raise InputError("must be at least 1", field="nodes", value=0)

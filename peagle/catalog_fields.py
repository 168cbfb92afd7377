"""Dataclasses made of a catalog file's content, each field checked against its type hint.

Each plain type has a rule; `Annotated` gives a field one of its own. An error's field is the path
from the entry's name to the value, as mine.heads.eagle3.k.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from peagle.errors import InputError

Record = TypeVar("Record")


class Rule(NamedTuple):
    """A test of a value, true for an accepted one, and the reason why a value is refused."""

    accepts: Callable[[Any], object]
    refused: str


def is_hub_id(name: Any) -> bool:
    """Whether something has the form of a hub id: owner/name[@revision]."""
    return isinstance(name, str) and re.match(r"[^./~@][^/@]*/[^/@]+(@|$)", name) is not None


def _is_number(value: Any, *kinds: type) -> bool:
    return type(value) in kinds and value >= 1  # a bool is an int, but not of that type


PLAIN_RULES = {
    str: Rule(lambda text: isinstance(text, str) and text.strip(), "is no text (put it in quotes)"),
    int: Rule(lambda value: _is_number(value, int), "is no whole number of at least 1"),
    float: Rule(lambda value: _is_number(value, int, float), "is no number of at least 1"),
    bool: Rule(lambda value: isinstance(value, bool), "is neither true nor false"),
}
HubId = Annotated[str, Rule(is_hub_id, "is no hub id (owner/name[@revision])")]
Scalar = str | int | float | bool
NO_DASHES = Rule(lambda name: not name.startswith("-"), "is no flag: give flags without dashes")
PLAIN = Rule(lambda value: isinstance(value, Scalar), "is no text, number, true or false")
VllmFlags = Mapping[Annotated[str, NO_DASHES], Annotated[Scalar, PLAIN]]


def read_record(kind: type[Record], content: Any, field: str) -> Record:
    """Make a dataclass of a mapping of its fields: all the required ones and no others."""
    given = read_mapping(content, field)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    required = {name for name, each in known.items()
                if each.default is MISSING and each.default_factory is MISSING}  # fmt: skip
    for name in sorted(given.keys() - known.keys()):
        fix = f"known are {', '.join(known)}"
        raise InputError("there is no such field", field=f"{field}.{name}", fix=fix)
    for name in sorted(required - given.keys()):
        raise InputError("is missing", field=f"{field}.{name}")
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{name: _read(hints[name], given[name], f"{field}.{name}") for name in given})


def read_mapping(content: Any, field: str | None) -> dict[str, Any]:
    """Return `content`, which must be a mapping of names."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError("is no mapping of names", field=field, value=content)
    return content


def _read(hint: Any, value: Any, field: str) -> Any:
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin in (Union, UnionType):
        options = [each for each in parts if each is not NoneType]
        chosen = options[0] if isinstance(value, dict) else options[-1]  # a dataclass comes first
        return _read(chosen, value, field)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError("is no list", field=field, value=value)
        return tuple(_read(parts[0], each, f"{field}[{at}]") for at, each in enumerate(value))
    if origin is Mapping:
        given = read_mapping(value, field)
        for name in given:
            _check(parts[0], name, field)
        return {name: _read(parts[1], each, f"{field}.{name}") for name, each in given.items()}
    if is_dataclass(hint):
        return read_record(hint, value, field)  # type: ignore[arg-type]
    _check(str if hint is Path else hint, value, field)
    return Path(value) if hint is Path else value


def _check(hint: Any, value: Any, field: str) -> None:
    """Raise InputError for a value that a plain or annotated type does not accept."""
    rule = hint.__metadata__[0] if get_origin(hint) is Annotated else PLAIN_RULES[hint]
    if not rule.accepts(value):
        raise InputError(rule.refused, field=field, value=value)

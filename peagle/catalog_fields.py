"""Dataclasses made of what a catalog file has, each field checked as its type hint says.

Each plain type has a rule; `Annotated` gives a field one of its own. Errors name the field and the
value, after the file and the entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from peagle.errors import InputError

Record = TypeVar("Record")


class Rule(NamedTuple):
    """A test of a value, true for an accepted one, and the words that follow a refused one."""

    accepts: Callable[[Any], object]
    refused: str


def is_hub_id(name: Any) -> bool:
    """Whether something has the form of a hub id: owner/name[@revision]."""
    if not isinstance(name, str):
        return False
    hub_id, _, _ = name.partition("@")
    owner, _, model = hub_id.partition("/")
    return bool(owner and model) and "/" not in model and not name.startswith((".", "/", "~"))


def _is_number(value: Any, *kinds: type) -> bool:
    return type(value) in kinds and value >= 1  # a bool is an int, but not of that type


PLAIN_RULES = {
    str: Rule(lambda text: isinstance(text, str) and text.strip(), "is no text (put it in quotes)"),
    int: Rule(lambda value: _is_number(value, int), "is no whole number of at least 1"),
    float: Rule(lambda value: _is_number(value, int, float), "is no number of at least 1"),
    bool: Rule(lambda value: isinstance(value, bool), "is neither true nor false"),
}
HubId = Annotated[str, Rule(is_hub_id, "is no hub id (owner/name[@revision])")]
FlagName = Annotated[
    str, Rule(lambda name: not name.startswith("-"), "is no flag: give flags without dashes")
]
Scalar = str | int | float | bool
FlagValue = Annotated[
    Scalar, Rule(lambda value: isinstance(value, Scalar), "is no text, number, true or false")
]
VllmFlags = Mapping[FlagName, FlagValue]


def read_record(kind: type[Record], content: Any, where: str) -> Record:
    """Make a dataclass of a mapping of its fields: all the required ones and no others."""
    given = read_mapping(content, where)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}; known are {', '.join(known)}")
    for name, each in known.items():
        required = each.default is MISSING and each.default_factory is MISSING
        if required and name not in given:
            raise InputError(f"{where}: the field {name} is missing")
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{name: _read(hints[name], given[name], f"{where}.{name}") for name in given})


def read_mapping(content: Any, where: str) -> dict[str, Any]:
    """Return `content`, which must be a mapping of names."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(f"{where}: {content!r} is no mapping of names")
    return content


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        options = [each for each in parts if each is not NoneType]
        chosen = options[0] if isinstance(value, dict) else options[-1]  # a dataclass comes first
        return _read(chosen, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where}: {value!r} is no list")
        return tuple(_read(parts[0], each, f"{where}[{at}]") for at, each in enumerate(value))
    if origin is Mapping:
        given = read_mapping(value, where)
        for name in given:
            _check(parts[0], name, where)
        return {name: _read(parts[1], each, f"{where}.{name}") for name, each in given.items()}
    if is_dataclass(hint):
        return read_record(hint, value, where)  # type: ignore[arg-type]
    if hint is Path:
        return Path(_read(str, value, where))
    _check(hint, value, where)
    return value


def _check(hint: Any, value: Any, where: str) -> None:
    """Raise InputError for a value that a plain or annotated type does not accept."""
    rule = hint.__metadata__[0] if get_origin(hint) is Annotated else PLAIN_RULES[hint]
    if not rule.accepts(value):
        raise InputError(f"{where}: {value!r} {rule.refused}")

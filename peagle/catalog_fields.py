"""Dataclasses made of what a catalog file has, each field checked as its type hint says.

A `str` is a text that is not empty, an `int` or `float` a number of at least 1. `Annotated` adds a
rule. Errors name the field and the value, after the file and the entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from peagle.errors import InputError

Record = TypeVar("Record")
REFUSED = {
    str: "is no text (put it in quotes)",
    int: "is no whole number of at least 1",
    float: "is no number of at least 1",
    bool: "is neither true nor false",
}


class Rule(NamedTuple):
    """What a field accepts; `refused` follows a value that it does not."""

    accepts: Callable[[Any], bool]
    refused: str


def is_hub_id(name: Any) -> bool:
    """Whether something has the form of a hub id: owner/name[@revision]."""
    if not isinstance(name, str):
        return False
    hub_id, _, _ = name.partition("@")
    owner, _, model = hub_id.partition("/")
    return bool(owner and model) and "/" not in model and not name.startswith((".", "/", "~"))


def _is_flag(name: str) -> bool:
    return not name.startswith("-")


def _is_flag_value(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


HubId = Annotated[str, Rule(is_hub_id, "is no hub id (owner/name[@revision])")]
FlagName = Annotated[str, Rule(_is_flag, "is no flag: give flags without dashes")]
FlagValue = Annotated[
    str | int | float | bool, Rule(_is_flag_value, "is no text, number, true or false")
]
Flags = Mapping[FlagName, FlagValue]  # vLLM's


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
    if get_origin(hint) is Annotated:
        [rule] = hint.__metadata__
        accepted, refused = rule.accepts(value), rule.refused
    else:
        accepted, refused = _is_plain(hint, value), REFUSED[hint]
    if not accepted:
        raise InputError(f"{where}: {value!r} {refused}")


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is bool or isinstance(value, bool):  # which is an int, too
        return kind is type(value)
    if kind is str:
        return isinstance(value, str) and bool(value.strip())
    return isinstance(value, int | kind) and bool(value >= 1)

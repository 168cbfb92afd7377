"""Checks of the fields of a catalog file. Each takes a mapping, a field's name and where the
mapping is in the file; returns the value, or raises InputError that names file, entry, field and
value."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from peagle.errors import InputError

Check = Callable[[dict[str, Any], str, str], Any]
Flags = Mapping[str, str | int | float | bool]  # vLLM's, without dashes


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id: owner/name[@revision]."""
    hub_id, _, _ = name.partition("@")
    owner, _, model = hub_id.partition("/")
    return bool(owner and model) and "/" not in model and not name.startswith((".", "/", "~"))


def optional(given: dict[str, Any], where: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Those of the optional fields that are given, checked."""
    return {name: check(given, name, where) for name, check in checks.items() if name in given}


def mapping(content: Any, where: str) -> dict[str, Any]:
    """A mapping of names."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(f"{where}: {content!r} is no mapping of names")
    return content


def of_class(content: Any, where: str, kind: type, required: tuple[str, ...]) -> dict[str, Any]:
    """A mapping with the fields of a dataclass: all the required ones and no others."""
    given = mapping(content, where)
    known = [each.name for each in fields(kind)]
    for name in given:
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}; known are {', '.join(known)}")
    for name in required:
        if name not in given:
            raise InputError(f"{where}: the field {name} is missing")
    return given


def text(given: dict[str, Any], name: str, where: str) -> str:
    """A text that is not empty."""
    if not isinstance(given[name], str) or not given[name].strip():
        raise InputError(f"{where}.{name}: {given[name]!r} is no text (put it in quotes)")
    return str(given[name])


def hub_id(given: dict[str, Any], name: str, where: str) -> str:
    """A hub id."""
    value = text(given, name, where)
    if not is_hub_id(value):
        raise InputError(f"{where}.{name}: {value!r} is no hub id (owner/name[@revision])")
    return value


def count(given: dict[str, Any], name: str, where: str) -> int:
    """A whole number of at least 1."""
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where}.{name}: {value!r} is no whole number of at least 1")
    return value


def truth(given: dict[str, Any], name: str, where: str) -> bool:
    """True or false."""
    if not isinstance(given[name], bool):
        raise InputError(f"{where}.{name}: {given[name]!r} is neither true nor false")
    return given[name]


def flags(given: dict[str, Any], name: str, where: str) -> Flags:
    """vLLM's flags."""
    found = mapping(given[name], f"{where}.{name}")
    for flag, value in found.items():
        if flag.startswith("-") or not isinstance(value, str | int | float | bool):
            why = "flags without dashes, each a text, a number, true or false"
            raise InputError(f"{where}.{name}: {flag}: {value!r}: give {why}")
    return MappingProxyType(found)


def profiles(given: dict[str, Any], name: str, where: str) -> Mapping[str, Flags]:
    """vLLM's flags by the name of a profile."""
    found = mapping(given[name], f"{where}.{name}")
    return MappingProxyType({each: flags(found, each, f"{where}.{name}") for each in found})


def environment(given: dict[str, Any], name: str, where: str) -> Mapping[str, str]:
    """Environment variables."""
    values = mapping(given[name], f"{where}.{name}")
    return MappingProxyType({key: text(values, key, f"{where}.{name}") for key in values})

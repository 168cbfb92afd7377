"""The head that a deployment drafts with: the one that is named, or the catalog's."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peagle.catalog import METHODS, Entry, Head, PackagedGGUF, load_catalog, missing_head
from peagle.catalog_fields import is_hub_id
from peagle.errors import InputError, InputWarning

DEFAULT_K = 3  # of a head elsewhere, where neither the user nor the catalog names a number


@dataclass(frozen=True, slots=True)
class Drafting:
    """The options of `peagle deploy` about drafting, checked; `choose` resolves None."""

    head: str | None = None  # hub id, or a folder of this machine
    method: str | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise InputError(f"--method {self.method!r}: choose {' or '.join(METHODS)}")
        if self.k is not None and self.k < 1:
            raise InputError(f"--k {self.k}: must be at least 1")


class Chosen(NamedTuple):
    """A head as the engine is told of it."""

    method: str
    place: str | None  # hub id or folder; None: the engine finds it by the target's name
    k: int | None  # None: the engine chooses


def choose(name: str, entry: Entry, asked: Drafting, *, remote: bool) -> Chosen | None:
    """The head of --head; without it the catalog's head of --method; without that its P-EAGLE head,
    else its EAGLE-3 head. Warns when there is none, and returns None. Raises InputError for a head
    that cannot be read where the engine runs."""
    if asked.head is not None:
        return _named(asked.head, asked, entry, remote)
    method = asked.method or next((each for each in METHODS if each in entry.heads), None)
    if method is not None and method not in entry.heads:
        why = f"the catalog has no such head for {name}: name one with --head"
        raise InputError(f"--method {method}: {why}")
    if method is not None:
        head = entry.heads[method]
        _warn_of(name, head, method, asked)
        return Chosen(method, _place(name, entry, method, remote), asked.k or head.k)
    if asked.k is not None:
        raise InputError(f"--k {asked.k}: {name} has no head: name one with --head")
    warnings.warn(
        InputWarning(f"{name} has no head: nothing will draft; name one with --head"), stacklevel=2
    )
    return None


def _named(head: str, asked: Drafting, entry: Entry, remote: bool) -> Chosen:
    """The head of --head. A folder's method and K are read by the process that serves it."""
    if Path(head).expanduser().is_dir():
        if remote:
            why = "a folder is read on this machine only: `peagle push` it and give its hub id"
            raise InputError(f"--head {head}: {why}")
        folder = Path(head).expanduser().resolve()
        return Chosen(asked.method or METHODS[0], str(folder), asked.k)
    if not is_hub_id(head):
        raise InputError(f"--head {head}: no such folder, and no hub id (owner/name[@revision])")
    for known in (entry, *load_catalog().values()):
        for method, each in known.heads.items():
            if each.hub == head and asked.method in (None, method):
                return Chosen(method, head, asked.k or each.k)
    method = asked.method or _guess(head)
    if asked.method is None and remote:
        why = f"not in the catalog, assumed to be a {method} head: if it is not, give --method"
        warnings.warn(InputWarning(f"--head {head}: {why}"), stacklevel=2)
    return Chosen(method, head, asked.k or (DEFAULT_K if remote else None))


def _guess(head: str) -> str:
    """The method of a head by its name, as vLLM infers it."""
    return "eagle3" if "eagle3" in head.lower() else METHODS[0]


def _place(name: str, entry: Entry, method: str, remote: bool) -> str | None:
    """Hub id or folder of the catalog's head; None if the engine finds it by the target's name."""
    head = entry.heads[method]
    if isinstance(entry.target, PackagedGGUF) and method == METHODS[0]:
        # An image made of the repository has the head.
        missing = None if remote else missing_head(name, method)
        if missing:
            warnings.warn(InputWarning(f"nothing will draft: {missing}"), stacklevel=2)
        return None
    if remote and head.hub is None:
        how = "upload it with `peagle push` and name it with `hub:` in the catalog"
        raise InputError(f"the head of {name} is the folder {head.folder}: {how}")
    if head.place is None:
        raise InputError(f"the head of {name} is not here: no folder {head.folder}")
    return head.place


def _warn_of(name: str, head: Head, method: str, asked: Drafting) -> None:
    """Warn that a published EAGLE-3 head is used, since the entry has no P-EAGLE head."""
    if method != METHODS[0] and asked.method is None and head.source:
        public = f"the public {method} head {head.hub} drafts (source: {head.source})"
        warnings.warn(InputWarning(f"{name} has no {METHODS[0]} head: {public}"), stacklevel=2)

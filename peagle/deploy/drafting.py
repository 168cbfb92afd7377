"""The head that a deployment drafts with: the one that is named, or the catalog's."""

import warnings
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path

from peagle.catalog import METHODS, Entry, PackagedGGUF, how_to_get, load_catalog
from peagle.catalog_fields import is_hub_id
from peagle.errors import InputError, InputWarning

DEFAULT_K = 3  # of a head elsewhere, where neither the user nor the catalog names a number


@dataclass(frozen=True, slots=True)
class Drafting:
    """A head, its method, and its number of draft tokens; checked.

    In the user's input None means the catalog's value; after `choose`, the engine's own default.
    """

    head: str | None = None  # hub id[@revision], or a folder of this machine
    method: str | None = None
    k: int | None = None  # num_speculative_tokens

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            fix = f"choose {' or '.join(METHODS)}"
            raise InputError("is unknown", field="method", value=self.method, fix=fix)
        if self.k is not None and self.k < 1:
            raise InputError("must be at least 1", field="k", value=self.k)


def choose(name: str, entry: Entry, asked: Drafting, *, remote: bool) -> Drafting:
    """The named head, else the catalog's head of the named method, else the catalog's best.

    Warns if there is none. Raises InputError for a head that the engine's machine cannot read
    (`remote`: another machine).
    """
    if asked.head is not None:
        return _named(asked.head, asked, entry, remote)
    method = asked.method or next((each for each in METHODS if each in entry.heads), None)
    if method is None:
        if asked.k is not None:
            why, fix = f"{name} has no head", "name one with `head`"
            raise InputError(why, field="k", value=asked.k, fix=fix)
        _warn(f"{name} has no head: nothing will draft; name one with `head`")
        return asked
    if method not in entry.heads:
        why, fix = f"the catalog has no such head for {name}", "name one with `head`"
        raise InputError(why, field="method", value=method, fix=fix)
    known = entry.heads[method]
    if asked.method is None and method != METHODS[0] and known.source:
        public = f"the public {method} head {known.hub} drafts (source: {known.source})"
        _warn(f"{name} has no {METHODS[0]} head: {public}")
    return _of_catalog(name, entry, replace(asked, method=method), remote)


def _named(head: str, asked: Drafting, entry: Entry, remote: bool) -> Drafting:
    """The head of a folder or hub id. On this machine the engine reads the method and K from it."""
    folder = Path(expanduser(head))
    if folder.is_dir():
        if remote:
            why, fix = "other machines cannot read a folder", "upload it with `hf upload`"
            raise InputError(why, field="head", value=head, fix=f"{fix} and give its hub id")
        return replace(asked, head=str(folder.resolve()))
    if not is_hub_id(head):
        why = "no such folder, and no hub id (owner/name[@revision])"
        raise InputError(why, field="head", value=head)
    for known in (entry, *load_catalog().values()):
        for method, each in known.heads.items():
            if each.hub == head and asked.method in (None, method):
                return Drafting(head, method, asked.k or each.k)
    if not remote:
        return asked
    # As vLLM infers it.
    guessed = next((each for each in METHODS[1:] if each in head.lower()), METHODS[0])
    method = asked.method or guessed
    if asked.method is None:
        why = f"not in the catalog, assumed to be a {method} head: if it is not, give `method`"
        _warn(f"head {head}: {why}")
    return Drafting(head, method, asked.k or DEFAULT_K)


def _of_catalog(name: str, entry: Entry, asked: Drafting, remote: bool) -> Drafting:
    """The catalog's head of the method."""
    assert asked.method is not None
    head = entry.heads[asked.method]
    if isinstance(entry.target, PackagedGGUF) and asked.method == METHODS[0]:
        # The engine finds it by the target's name; an image made of the repository has it.
        if not remote and head.location is None:
            _warn(f"the {asked.method} head of {name} is not here: {how_to_get(head)}")
        return asked
    if remote and head.hub is None:
        why = f"the head of {name} is a folder, which other machines cannot read"
        fix = "upload it with `hf upload` and name it with hub: in the catalog"
        raise InputError(why, field="head", value=head.folder, fix=fix)
    if head.location is None:
        raise InputError(f"the head of {name}: no such folder", field="head", value=head.folder)
    return Drafting(head.location, asked.method, asked.k or head.k)


def _warn(text: str) -> None:
    warnings.warn(InputWarning(text), stacklevel=3)

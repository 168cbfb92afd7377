"""From a target, or a name, to a head: the catalog's, or the one that is named."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from peagle.catalog import CHOICES, HEADLESS, METHODS, CatalogHead, how_to_get, known_entry
from peagle.errors import InputError, InputWarning
from peagle.heads.folder import FORMS, head_folder
from peagle.heads.format import read_keys
from peagle.methods.keys import UNKNOWN_DEPTHS


@dataclass(frozen=True, slots=True)
class Head:
    """A head on this machine, before it is loaded."""

    name: str  # folder or hub id, as the user or the catalog has it
    folder: Path
    method: str
    k: int  # num_speculative_tokens


def find_head(
    target: str, name: str | None = None, method: str | None = None, *, field: str = "head"
) -> Head | None:
    """The head `name` (a folder or a hub id), else the catalog's for `target`; None for none.

    Raises InputError about the method, or about the head as `field`. Warns when no method is given
    and the catalog's head is not installed.
    """
    if method is not None and method not in CHOICES:
        fix = f"choose {', '.join(CHOICES)}"
        raise InputError("is no method", field="method", value=method, fix=fix)
    if method in HEADLESS:
        return None
    known = None if name else _catalog_head(target, method, field)
    name = known.location if known else name
    if name is None:
        return None
    folder = head_folder(name, field)
    keys = read_keys(folder)
    if method not in (None, keys.method):
        why = f"its method is {keys.method}, not {method}"
        raise InputError(why, field=field, value=Path(name))
    k = known.k if known else keys.depths or UNKNOWN_DEPTHS
    return Head(name, folder, keys.method, k)


def _catalog_head(target: str, method: str | None, field: str) -> CatalogHead | None:
    """The catalog's head, if it is on this machine or on the hub."""
    wanted = method or METHODS[0]
    entry = known_entry(target)
    known = entry.heads.get(wanted) if entry else None
    if known is None:
        if method is None:
            return None
        raise InputError(f"no {wanted} head is known for {target}", field=field, fix=FORMS)
    if known.location is not None:
        return known
    why, fix = f"the {wanted} head of {target} is not here", how_to_get(known)
    if method is not None:
        raise InputError(why, field=field, fix=fix)
    warnings.warn(InputWarning(f"{why}; {fix}"), stacklevel=3)
    return None

"""From a head's name to its folder: a catalog entry, a folder, or a repository of the hub."""

import warnings
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from peagle.catalog import CHOICES, HEADLESS, METHODS, how_to_get, known_entry
from peagle.errors import InputError, InputWarning, first_line
from peagle.model.loader import quiet_hub


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
        why = f"the {wanted} head of {target} is not here: {how_to_get(known)}"
    if method is not None:
        raise InputError(why)
    if known is not None:
        warnings.warn(InputWarning(why), stacklevel=2)
    return None


def head_folder(name: str | Path) -> Path:
    """Folder of a head given as folder or hub id[@revision] (downloaded into the hub's cache)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        below = folder / "head"  # of a training run
        if not (folder / "config.json").is_file():
            hint = f"; did you mean {below}?" if (below / "config.json").is_file() else ""
            raise InputError(f"head {name}: no config.json{hint}")
        return folder
    hub_id, _, revision = str(name).partition("@")
    if str(name).startswith((".", "/", "~")) or hub_id.count("/") != 1:
        raise InputError(
            f"head {name}: no such folder (give a folder or a hub id owner/name[@revision])"
        )
    try:
        wanted = ["*.json", "*.safetensors"]  # of folders, too
        with quiet_hub():
            return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"head {name}: neither a folder nor a reachable hub repository ({first_line(error)})"
        ) from error

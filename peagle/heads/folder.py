"""The folder of a head: one on this machine, or a repository of the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from peagle.catalog_fields import is_hub_id
from peagle.errors import InputError, first_line
from peagle.model.loader import quiet_hub

FILES = ["*.json", "*.safetensors"]  # of folders, too
FORMS = "give a folder or a hub id (owner/name[@revision])"


def head_folder(name: str | Path, field: str = "head", wanted: list[str] = FILES) -> Path:
    """Folder of a head given as folder or hub id[@revision], of which the `wanted` files are
    downloaded into the hub's cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        below = folder / "head"  # of a training run
        if not (folder / "config.json").is_file():
            fix = f"did you mean {below}?" if (below / "config.json").is_file() else None
            raise InputError("no config.json", field=field, value=Path(name), fix=fix)
        return folder
    if not is_hub_id(str(name)):
        raise InputError("no such folder", field=field, value=Path(name), fix=FORMS)
    hub_id, _, revision = str(name).partition("@")
    try:
        with quiet_hub():
            return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = f"neither a folder nor a reachable hub repository ({first_line(error)})"
        raise InputError(why, field=field, value=Path(name)) from error

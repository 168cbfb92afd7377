"""From a head's name to a drafter for a target."""

import logging
from dataclasses import replace
from os.path import expanduser
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from peagle.errors import InputError, first_line
from peagle.methods.checkpoint import parse, read_head, state_dict_of
from peagle.methods.layer_ids import nested_ids, try_both
from peagle.methods.registry import method_of
from peagle.methods.validate import TABLE, validate
from peagle.model.config import DrafterConfig, Provenance
from peagle.model.drafter import Drafter
from peagle.model.loader import quiet_hub
from peagle.model.target import Target
from peagle.shown import model_name

log = logging.getLogger(__name__)


def load_drafter(name: str | Path, target: Target, *, force: bool = False) -> Drafter:
    """Load the head in folder or hub repository `name` (either dialect), checked against `target`,
    in its dtype and on its device. `force` accepts another target of the same shape. Layer ids
    that may be counted in two ways are tried, and the log tells what was found (`layer_ids.py`).

    Raises InputError that names the head and the first of its problems, see `validate`.
    """
    folder = head_folder(name)
    files = read_head(folder)
    config = parse(files.raw, folder / "config.json", len(target.layers))
    for problem in validate(files.raw, files.tensors, target):
        if problem.blocks and not (force and problem.forgivable):
            raise InputError(f"head {name} does not fit {model_name(target.name)}: {problem}")
    ours = config.provenance != Provenance()
    if not ours and config.embedding == "full" and TABLE not in files.tensors:
        config = replace(config, embedding="shared")  # as vLLM does; our own heads say it
    drafter = method_of(config).build(config)
    drafter.load_state_dict(state_dict_of(files.tensors, config))
    drafter = drafter.to(target.device, target.dtype).eval()
    drafter.share_embedding(target.embedding)
    if ids := nested_ids(files):
        layers, found = try_both(drafter, target, ids)
        drafter.config = replace(config, feature_layers=layers)
        log.warning("head %s: layers %s: %s", name, list(layers), found)
    return drafter


def rebuilt(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """The same weights in a head of another config, which may ask for more of them or fewer."""
    made = method_of(config).build(config).to(drafter.norm.weight)
    made.load_state_dict(drafter.state_dict(), strict=False)
    if drafter.shared_embedding is not None:
        made.share_embedding(drafter.shared_embedding)
    return made


def head_folder(name: str | Path) -> Path:
    """Folder of a head given as folder or hub id[@revision] (downloaded into the hub's cache)."""
    folder = Path(expanduser(name))
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

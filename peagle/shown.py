"""Names of models as people and clients see them."""

from os.path import expanduser
from pathlib import Path


def model_name(target: str) -> str:
    """The name of a target: of a folder its last part, of a GGUF file the stem. Hub ids and names
    of the catalog stay. No path of this machine is shown to clients."""
    path = Path(expanduser(target))
    if path.suffix == ".gguf":
        return path.stem
    local = path.is_dir() or target.startswith((".", "/", "~"))
    return path.resolve().name if local else target

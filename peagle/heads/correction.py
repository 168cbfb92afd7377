"""The correction of a head on disk: `correction/` in the head's folder, with a config.json and
safetensors of its own. vLLM reads the top folder alone, so it runs the head without it.

It was trained with one head, and is of no use to another: config.json has a digest of that one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import InputError
from peagle.model.config import DrafterConfig
from peagle.model.correction import CorrectionConfig
from peagle.model.int8 import SCALE, restore_int8

FOLDER = "correction"
PREFIX = "correction."  # of its tensors' names in a drafter
DIGESTED = ("d2t", "norm.weight", "lm_head.weight")  # what its candidates come from


def write_correction(folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write what `tensors` of a drafter hold of its correction into `folder` of the head."""
    own = {name.removeprefix(PREFIX): t for name, t in tensors.items() if name.startswith(PREFIX)}
    assert config.correction is not None
    about = {
        **asdict(config.correction),
        "depths": config.depths,
        "dtype": str(own["token.weight"].dtype).removeprefix("torch."),
        "head": digest(tensors),
    }
    made = folder / FOLDER
    made.mkdir()
    save_file(own, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")


def parse_correction(raw: Mapping[str, Any]) -> CorrectionConfig | None:
    """The sizes that a correction's config.json names. Raises InputError where it does not."""
    if not raw:
        return None
    if missing := {"rank", "candidates"} - raw.keys():
        raise InputError(f"{FOLDER}/config.json: missing {min(missing)!r}")
    return CorrectionConfig(raw["rank"], raw["candidates"])


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Of the tensors of a head, as they are read: int8 rows as their products with the scales."""
    found = hashlib.sha256()
    for name in DIGESTED:
        if name in tensors:
            tensor = tensors[name]
            if name + SCALE in tensors:
                tensor = restore_int8(tensor, tensors[name + SCALE])
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]

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

from peagle.model.config import DrafterConfig
from peagle.model.int8 import SCALE, restore_int8

CORRECTION = "correction"  # the folder, and the key of its config.json in `HeadKeys.raw`
PREFIX = "correction."  # of its tensors' names in a drafter
DIGESTED = ("d2t", "norm.weight", "lm_head.weight")  # its candidates come from these


def write_correction(folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write the correction's tensors among a drafter's `tensors` into the head's folder."""
    chosen = {name.removeprefix(PREFIX): t for name, t in tensors.items() if PREFIX in name}
    assert config.correction is not None
    keys = {
        **asdict(config.correction),
        "depths": config.depths,
        "dtype": str(chosen["token.weight"].dtype).removeprefix("torch."),
        "head": digest(tensors),
    }
    made = folder / CORRECTION
    made.mkdir()
    save_file(chosen, made / "model.safetensors", {"format": "pt"})
    write_json(made, keys)


def write_json(folder: Path, keys: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the tensors that a correction depends on, as they are read: int8 rows as their
    products with the scales."""
    found = hashlib.sha256()
    for name in DIGESTED:
        if name in tensors:
            tensor = tensors[name]
            if name + SCALE in tensors:
                tensor = restore_int8(tensor, tensors[name + SCALE])
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]

"""The correction of a head on disk: `correction/` in the head's folder, with a config.json and
safetensors of its own. vLLM reads the top folder alone, so it runs the head without it.

It was trained with one head, and is of no use to another: config.json has a digest of that one.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from peagle.model.int8 import SCALE, restore_int8

CORRECTION = "correction"  # the folder, and the key of its config.json in `HeadKeys.raw`
PREFIX = "correction."  # of its tensors' names in a drafter
DIGESTED = ("d2t", "norm.weight", "lm_head.weight")  # its candidates come from these


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

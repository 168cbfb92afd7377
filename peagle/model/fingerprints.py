"""Fingerprints of a target: by these a head knows the target that it was trained for."""

import json

import torch

from peagle.model.base_target import BaseTarget
from peagle.paths import digest


def outer_norms(target: BaseTarget) -> list[tuple[int, str, torch.Tensor]]:
    """Norms of the first and last layer, by which a target is known: layer, name and weight. In a
    target of one layer they count twice."""
    ends = (0, target.num_layers - 1)
    found = [(n, name, w) for n in ends for name, w in sorted(target.layer_weights(n).items())]
    return [(n, name, weight) for n, name, weight in found if "norm" in name]


def weights_hash(target: BaseTarget) -> str:
    """Fingerprint of a few weights: 64 embedding rows, and the first and last layers' norms."""
    parts = [target.embedding[:64], *(weight for _, _, weight in outer_norms(target))]
    rounded = (part.detach().to("cpu", torch.bfloat16).contiguous() for part in parts)
    return digest(b"".join(each.view(torch.uint8).numpy().tobytes() for each in rounded))


def config_hash(target: BaseTarget) -> str:
    """Fingerprint of the architecture: sizes only, whatever the dtype or library version."""
    keys = ("hidden_size", "model_type", "num_attention_heads", "num_hidden_layers", "vocab_size")
    sizes = {key: getattr(target.config, key, None) for key in keys}
    return digest(json.dumps(sizes, sort_keys=True).encode())


def template_hash(target: BaseTarget) -> str:
    """Fingerprint of the chat template, empty when there is none."""
    template = getattr(target.tokenizer, "chat_template", None)
    return digest(str(template).encode()) if template else ""

"""Fingerprints of a target: by these a head knows the target that it was trained for."""

import hashlib
import json

import torch

from peagle.model.base_target import BaseTarget


def weights_hash(target: BaseTarget) -> str:
    """Fingerprint of a few weights: 64 embedding rows, and the first and last layers' norms."""
    digest = hashlib.sha256()
    parts = [target.embedding[:64]]
    for layer in (0, target.num_layers - 1):
        parts += [p for name, p in sorted(target.layer_weights(layer).items()) if "norm" in name]
    for part in parts:
        rounded = part.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def config_hash(target: BaseTarget) -> str:
    """Fingerprint of the architecture: sizes only, whatever the dtype or library version."""
    keys = ("hidden_size", "model_type", "num_attention_heads", "num_hidden_layers", "vocab_size")
    sizes = {key: getattr(target.config, key, None) for key in keys}
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16]


def template_hash(target: BaseTarget) -> str:
    """Fingerprint of the chat template, empty when there is none."""
    template = getattr(target.tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""

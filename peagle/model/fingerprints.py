"""Fingerprints of a target: by these a head knows the target that it was trained for."""

import hashlib
import json

import torch

from peagle.model.target import Target


def weights_hash(target: Target) -> str:
    """Fingerprint of a few weights: 64 embedding rows, and the first and last layers' norms."""
    digest = hashlib.sha256()
    parts = [target.embedding[:64]]
    for layer in (target.layers[0], target.layers[-1]):
        parts += [p for name, p in sorted(layer.named_parameters()) if "norm" in name]
    for part in parts:
        rounded = part.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def config_hash(target: Target) -> str:
    """Fingerprint of the architecture: sizes only, whatever the dtype or library version."""
    keys = ("hidden_size", "model_type", "num_attention_heads", "num_hidden_layers", "vocab_size")
    sizes = {key: getattr(target.config, key, None) for key in keys}
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16]


def template_hash(target: Target) -> str:
    """Fingerprint of the chat template, empty when there is none."""
    template = getattr(target.tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else ""

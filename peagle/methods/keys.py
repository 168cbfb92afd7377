"""Names in a head's files that several modules read.

A correction is in `correction/` in the head's folder, with a config.json and safetensors of its
own. vLLM reads the top folder alone, so it runs the head without it. It was trained with one head,
and is of no use to another: its config.json has a digest of that one.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peagle.model.config import DrafterConfig
from peagle.model.int8 import SCALE, restore_int8

SPECULATORS = "speculators_model_type"  # a config of that dialect has it
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
AUX_COUNT = "num_aux_hidden_states"  # the number of LAYER_IDS
# Where the mask id may be, in vLLM's order; first of all comes dflash_config.mask_token_id.
MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CORRECTION = "correction"  # the folder, and the key of its config.json in `HeadKeys.raw`
PREFIX = "correction."  # of its tensors' names in a drafter
DIGESTED = ("d2t", "norm.weight", "lm_head.weight")  # its candidates come from these
READ = {*FLAGS, *MASK_ID_KEYS, LAYER_IDS}  # keys that decide what a head computes
UNKNOWN_DEPTHS = 7  # draft tokens per round of a head that does not record its depths


def mask_ids(raw: Mapping[str, Any]) -> dict[str, int]:
    """The mask token id by each name it has in config.json, in vLLM's order."""
    nested = (raw.get("dflash_config") or {}).get("mask_token_id")
    named = {"dflash_config.mask_token_id": nested} | {key: raw.get(key) for key in MASK_ID_KEYS}
    return {key: token for key, token in named.items() if token is not None}


def default_k(config: DrafterConfig) -> int:
    """Default number of draft tokens per round."""
    return config.depths or UNKNOWN_DEPTHS


def speculators_keys(config: DrafterConfig, kind: str, architecture: str) -> dict[str, Any]:
    """Keys by which speculators knows a head of its `kind`."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": default_k(config)}
    speculation = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": config.provenance.target, "architectures": []},
    }
    return {"architectures": [architecture], SPECULATORS: kind, "speculators_config": speculation}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the tensors that a correction depends on, as they are read: int8 rows as their
    products with the scales."""
    found = hashlib.sha256()
    for name in DIGESTED:
        if (tensor := tensors.get(name)) is not None:
            if name + SCALE in tensors:
                tensor = restore_int8(tensor, tensors[name + SCALE])
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]

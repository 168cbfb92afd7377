"""Keys of a head's config.json that several modules read."""

from collections.abc import Mapping
from typing import Any

from peagle.model.config import DrafterConfig

SPECULATORS = "speculators_model_type"  # a config of that dialect has it
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
AUX_COUNT = "num_aux_hidden_states"  # the number of LAYER_IDS
# Where the mask id may be, in vLLM's order; first of all comes dflash_config.mask_token_id.
MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
UNKNOWN_DEPTHS = 7  # draft tokens per round of a head that does not record its depths


def mask_ids(raw: Mapping[str, Any]) -> dict[str, int]:
    """The mask token id by each name it has in config.json, in vLLM's order."""
    nested = (raw.get("dflash_config") or {}).get("mask_token_id")
    named = {"dflash_config.mask_token_id": nested}
    named |= {key: raw.get(key) for key in MASK_ID_KEYS}
    return {key: token for key, token in named.items() if token is not None}


def default_k(config: DrafterConfig) -> int:
    """Default number of draft tokens per round."""
    return config.depths or UNKNOWN_DEPTHS


def speculators_keys(config: DrafterConfig, kind: str, architecture: str) -> dict[str, Any]:
    """Keys by which speculators knows a head of its `kind`."""
    return {
        "architectures": [architecture],
        SPECULATORS: kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": default_k(config)}
            ],
            "verifier": {"name_or_path": config.provenance.target, "architectures": []},
        },
    }

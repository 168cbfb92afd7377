"""The description of a head to train, and its configuration for a target."""

from dataclasses import dataclass
from typing import get_args

from peagle.errors import InputError, check_at_least
from peagle.methods.registry import DEFAULT, METHODS
from peagle.model.config import DrafterConfig, Embedding, default_feature_layers
from peagle.model.layer_config import LayerConfig, head_size
from peagle.model.target import Target

SAME_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias",
)  # fmt: skip
DEPTHS = 8  # default of a head


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Settings of a new head.

    Head:
    method: Drafting method to train: p-eagle or eagle3.
    layers: Number of decoder layers of the head. Default: 4, or 1 for eagle3.
    depths: Number of draft tokens per round to train for (K). Default: 8.
    draft_vocab: Size of the draft vocabulary, the most frequent tokens. Default: 8192.
    feature_layers: Target layers whose inputs the head reads, as 2,15,27; the number of layers is
        what leaves the last one. Default: 2, n/2 and n - 3 of n layers.
    embedding: Input embedding of the head: full (its own table), mask-row (the target's, with a
        trained row for the mask token) or shared (the target's). Default: mask-row, or shared for
        eagle3.
    fc_norm: Normalise the features of each target layer before the head reads them. Default: in
        eagle3 only; with `init_from` as in that head.
    norm_output: Feed back the hidden state after the final norm, in eagle3. Default: yes; with
        `init_from` as in that head.
    warm_start: Start from the target's own layers, norm and output head, not from random weights.
    """

    method: str = DEFAULT
    layers: int | None = None
    depths: int | None = None
    draft_vocab: int | None = None
    feature_layers: tuple[int, ...] | None = None
    embedding: Embedding | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    warm_start: bool = True

    def __post_init__(self) -> None:
        check_at_least(1, layers=self.layers, depths=self.depths, draft_vocab=self.draft_vocab)
        for name, known in {"method": METHODS, "embedding": get_args(Embedding)}.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                fix = f"choose {' or '.join(known)}"
                raise InputError("is unknown", field=name, value=value, fix=fix)


def drafter_config(target: Target, spec: HeadSpec, mask_token_id: int | None) -> DrafterConfig:
    """The configuration of a head for `target`, from the target's configuration alone."""
    method = METHODS[spec.method]
    return DrafterConfig(
        method=method.name,
        transformer=_transformer_config(target, spec.layers or method.layers),
        feature_layers=spec.feature_layers or default_feature_layers(target.num_layers),
        draft_vocab_size=min(spec.draft_vocab or 8192, target.embedding.shape[0]),
        target_hidden_size=target.config.hidden_size,
        mask_token_id=mask_token_id if method.parallel else None,
        depths=spec.depths or DEPTHS,
        embedding=spec.embedding or ("mask-row" if method.parallel else "shared"),
        fc_norm=not method.parallel if spec.fc_norm is None else spec.fc_norm,
        norm_output=not method.parallel and spec.norm_output is not False,
    )


def _transformer_config(target: Target, layers: int) -> LayerConfig:
    """Llama layers (Qwen3 layers for a Qwen3-like target) of the target's sizes. Their activation
    is silu, whatever the target's: vLLM runs no other."""
    by_layer = getattr(target.config, "per_layer_config", None)
    source = target.config if by_layer is None else by_layer[0]  # Gemma-4's layers differ in heads
    kind = "qwen3" if source.model_type.startswith("qwen3") else "llama"
    same = {key: getattr(source, key, None) for key in SAME_KEYS}
    rope = same["rope_parameters"]
    if not isinstance(rope, dict) or "rope_type" not in rope:  # per-layer-type tables (Gemma)
        same["rope_parameters"] = None
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:  # heads turn all of a key
        same["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    sizes = {"num_hidden_layers": layers, "vocab_size": target.embedding.shape[0]}
    own = {"model_type": kind, "head_dim": head_size(source), **sizes}
    return LayerConfig.from_json(same | own)

"""Where training starts: a new drafter with the target's own weights where shapes allow."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from peagle.config import InputError
from peagle.model.config import (
    TRANSFORMERS,
    DrafterConfig,
    Embedding,
    Method,
    Provenance,
    default_feature_layers,
)
from peagle.model.drafter import Drafter
from peagle.model.layers import head_size
from peagle.model.target import Target
from peagle.model.vocab import draft_offsets, frequent_tokens, pick_mask_token

SAME_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What head to make."""

    method: Method = "p-eagle"
    layers: int = 4  # of the drafter
    depths: int = 8  # K trained for
    draft_vocab: int = 8192  # most frequent answer tokens
    feature_layers: tuple[int, ...] | None = None  # None: vLLM's default
    embedding: Embedding | None = None  # None: the target's table, P-EAGLE trains the mask's row
    warm_start: bool = True  # from the target's own layers, norm and head

    def __post_init__(self) -> None:
        for name in ("layers", "depths", "draft_vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.method not in ("p-eagle", "eagle3"):
            raise InputError(f"method {self.method!r}: choose p-eagle or eagle3")
        if self.embedding not in (None, "full", "mask-row", "shared"):
            raise InputError(f"embedding {self.embedding!r}: choose full, mask-row or shared")


def new_drafter(target: Target, answers: Iterable[list[int]], spec: HeadSpec) -> Drafter:
    """A float32 drafter for `target`: its draft vocabulary is what the answers use most.

    Copies the embedding, final norm, `lm_head` rows and the target's last `layers` layers; layer 0
    takes its q, k, v on the feature half; `fc` starts as the identity on the last feature.
    """
    vocab_size = target.embedding.shape[0]
    mask = pick_mask_token(target.tokenizer, vocab_size) if spec.method == "p-eagle" else None
    hashes = target.config_hash(), target.weights_hash(), target.template_hash()
    config = drafter_config(target, spec, mask)
    against = Provenance(target.name, *hashes, list(config.feature_layers))
    config = replace(config, provenance=against)
    drafter = Drafter(config).to(target.device)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    ids = frequent_tokens(answers, vocab_size, config.draft_vocab_size)
    drafter.d2t.copy_(draft_offsets(ids))
    drafter.share_embedding(target.embedding)
    _copy_embedding(drafter, target, ids)
    if spec.warm_start:
        _copy_layers(drafter, target, ids)
    return drafter


def drafter_config(target: Target, spec: HeadSpec, mask_token_id: int | None) -> DrafterConfig:
    """What `new_drafter` makes, by the target's configuration alone."""
    method = spec.method
    return DrafterConfig(
        method=method,
        transformer=_transformer_config(target, spec.layers),
        feature_layers=spec.feature_layers or default_feature_layers(len(target.layers)),
        draft_vocab_size=min(spec.draft_vocab, target.embedding.shape[0]),
        target_hidden_size=target.config.hidden_size,
        mask_token_id=mask_token_id if method == "p-eagle" else None,
        depths=spec.depths,
        embedding=spec.embedding or ("mask-row" if method == "p-eagle" else "shared"),
    )


def _transformer_config(target: Target, layers: int) -> PretrainedConfig:
    """Llama layers (Qwen3 layers for a Qwen3-like target) of the target's sizes."""
    source = target.config
    kind = "qwen3" if source.model_type.startswith("qwen3") else "llama"
    values = {key: getattr(source, key, None) for key in SAME_KEYS}
    same = {key: value for key, value in values.items() if value is not None}
    rope = same.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_type" not in rope:  # per-layer-type tables (Gemma)
        same.pop("rope_parameters", None)
    return TRANSFORMERS[kind](
        **same,
        head_dim=head_size(source),
        num_hidden_layers=layers,
        vocab_size=target.embedding.shape[0],
    )


@torch.no_grad()
def _copy_embedding(drafter: Drafter, target: Target, ids: Tensor) -> None:
    """The mask token starts in the middle of the draft vocabulary."""
    table = target.embedding
    middle = table[ids.to(table.device)].float().mean(0)
    if drafter.config.embedding == "mask-row":
        drafter.mask_embedding.copy_(middle)
    elif drafter.config.embedding == "full":
        _copy(drafter.embed_tokens.weight, table)
        if drafter.config.mask_token_id is not None:
            drafter.embed_tokens.weight[drafter.config.mask_token_id] = middle


@torch.no_grad()
def _copy_layers(drafter: Drafter, target: Target, ids: Tensor) -> None:
    hidden, table = drafter.config.transformer.hidden_size, target.embedding
    if drafter.config.target_hidden_size == hidden:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    _copy(drafter.norm.weight, getattr(target.decoder.norm, "weight", None))
    _copy(drafter.lm_head.weight, target.model.get_output_embeddings().weight[ids.to(table.device)])
    for mine, theirs in zip(drafter.layers, target.layers[-len(drafter.layers) :], strict=False):
        source = theirs.state_dict()  # of packed layers, too
        for name, parameter in mine.named_parameters():
            if name.startswith("self_attn.") and parameter.shape[1:] == (2 * hidden,):
                parameter[:, :hidden] *= 0.1  # the embedding half starts small
                _copy(parameter[:, hidden:], source.get(name))
            elif name == "hidden_norm.weight":
                _copy(parameter, source.get("input_layernorm.weight"))
            else:
                _copy(parameter, source.get(name))


def _copy(into: Tensor, source: Tensor | None) -> None:
    if source is not None and source.shape == into.shape:
        into.copy_(source)

"""Random heads of every kind for a tiny Llama target, and their forward by hand."""

from dataclasses import replace
from typing import Any

import torch
from families import PLAIN, TAPS, VOCAB, build
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerBase

from peagle.methods.registry import METHODS
from peagle.model.config import DrafterConfig, Embedding, Provenance
from peagle.model.drafter import Drafter
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.layer_config import LayerConfig
from peagle.model.target import Target
from peagle.train.warm_start import draft_offsets

MASK_ID = 64
HIDDEN = 32
DRAFT_IDS = torch.tensor([2, 3, 5, 8, 13, 21, 34, 55, 66])
EMBEDDINGS: dict[str, tuple[Embedding, ...]] = {
    "p-eagle": ("full", "mask-row", "shared"),
    "eagle3": ("full", "shared"),
}
KINDS = [(method, embedding) for method, each in EMBEDDINGS.items() for embedding in each]
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def tiny_target(
    seed: int = 0, tokenizer: PreTrainedTokenizerBase | None = None, **sizes: Any
) -> Target:
    return Target(build(LlamaConfig(**PLAIN | sizes), seed), tokenizer, f"tiny-{seed}")


def head_config(
    method: str = "p-eagle",
    embedding: Embedding = "full",
    *,
    kind: str = "llama",
    sizes: dict[str, Any] | None = None,
    **changes: Any,
) -> DrafterConfig:
    """`sizes` goes to the Llama or Qwen3 configuration, `changes` to DrafterConfig."""
    defaults = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }  # fmt: skip
    config = DrafterConfig(
        method=method,
        transformer=LayerConfig(model_type=kind, **defaults | (sizes or {})),
        feature_layers=TAPS,
        draft_vocab_size=len(DRAFT_IDS),
        target_hidden_size=HIDDEN,
        mask_token_id=MASK_ID if METHODS[method].parallel else None,
        embedding=embedding,
    )
    return replace(config, **changes)


def make_head(config: DrafterConfig, seed: int = 0, target: Target | None = None) -> Drafter:
    """Every weight drawn: a norm, bias or placeholder that is ignored must show."""
    drafter = Drafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(drafter.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise * 0.3 if "norm" in name else noise * 0.3)
    drafter.d2t.copy_(draft_offsets(DRAFT_IDS))
    if target is not None:
        drafter.share_embedding(target.embedding)
    return drafter.eval()


def provenance_of(target: Target) -> Provenance:
    hashes = (config_hash(target), weights_hash(target), template_hash(target))
    return Provenance(target.name, *hashes, data={"steps": 3}, acceptance={"humaneval": {"3": 1.5}})


class ByHand:
    """The drafter's forward from its weights alone: a slot's inputs in, hidden states out."""

    def __init__(self, drafter: Drafter) -> None:
        self.w, self.config = drafter.state_dict(), drafter.config
        self.sizes = drafter.config.transformer

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.tensor(0.0))

    def project(self, features: Tensor) -> Tensor:  # (T, F·E) → (T, D)
        if self.config.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.config.fc_norm:
            chunks = features.chunk(3, dim=-1)
            features = torch.cat([self.norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], -1)
        return self.linear(features, "fc")

    def heads(self, x: Tensor, name: str, positions: Tensor | None) -> Tensor:  # (T, heads, H)
        x = self.linear(x, f"{name}_proj").unflatten(-1, (-1, self.sizes.head_dim))
        if positions is None:
            return x
        if f"{name}_norm.weight" in self.w:
            x = self.norm(x, f"{name}_norm")
        half = self.sizes.head_dim // 2
        speed = self.sizes.rope_parameters["rope_theta"] ** -(torch.arange(half) / half)
        turn = torch.polar(torch.ones(len(x), half), positions[:, None] * speed)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attention(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        name = f"layers.{layer}.self_attn"
        q, k = (self.heads(x, f"{name}.{part}", positions) for part in "qk")
        v = self.heads(x, f"{name}.v", None)
        out = []
        for slot in range(len(x)):
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                scores = k[: slot + 1, shared] @ q[slot, head] / self.sizes.head_dim**0.5
                out.append(scores.softmax(-1) @ v[: slot + 1, shared])
        return self.linear(torch.stack(out).view(len(x), -1), f"{name}.o_proj")

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        name = f"layers.{layer}.mlp"
        gate = self.linear(x, f"{name}.gate_proj")
        up = self.linear(x, f"{name}.up_proj")
        return self.linear(gate * torch.sigmoid(gate) * up, f"{name}.down_proj")

    def forward(
        self, embedding: Tensor, feature: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(normed, before the norm) for T slots in order, each seeing those before it."""
        normed = self.norm(feature, "layers.0.hidden_norm")
        x = normed if self.config.norm_before_residual else feature
        for layer in range(self.sizes.num_hidden_layers):
            inputs = embedding if layer == 0 else x
            inputs = self.norm(inputs, f"layers.{layer}.input_layernorm")
            inputs = torch.cat([inputs, normed], dim=-1) if layer == 0 else inputs
            x = x + self.attention(inputs, layer, positions)
            x = x + self.mlp(self.norm(x, f"layers.{layer}.post_attention_layernorm"), layer)
        return self.norm(x, "norm"), x

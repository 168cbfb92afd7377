"""Targets on a CPU: described decoders in one native call, other ones by their own code.

Shapes: T rows, E hidden, F feature layers, R rows, V vocabulary, H head size, G tables of RoPE.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.cpu.decoder import Decoder, DecoderLayer, DecoderShape
from peagle.backends.cpu.matrix import CpuLinear, Weights, replace_linears
from peagle.backends.kv_cache import KVCache
from peagle.model.described import Described, describe
from peagle.model.target import Target, TargetOutput

PRODUCTS = {  # the tensors of a layer by the names in native/layer.h
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
NORMS = {"input_norm": "input_layernorm", "mlp_input_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "input_norm": "input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "mlp_input_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
MakeWeights = Callable[[Tensor], Weights]


class NativeTarget:
    """A described decoder whose layers run in one native call."""

    def __init__(
        self,
        config: Described,
        tensors: Mapping[str, Tensor],
        make: MakeWeights = Weights.plain,
        make_head: MakeWeights = Weights.plain,
    ) -> None:
        """`tensors`: weights by their names in transformers' checkpoints; `make` lays out those of
        the layers' products, `make_head` those of the output head."""
        self.config, self.embedding = config, tensors["model.embed_tokens.weight"]
        layers = []
        for number, facts in enumerate(config.layers):
            prefix = f"model.layers.{number}."
            weights = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            layer = _layer(config, weights, make)
            layers.append(layer._replace(window=facts.window, rope=facts.rope))
        norm = _norm(config, tensors["model.norm.weight"])
        sizes = (config.head_dim, config.rms_norm_eps, config.attention_scale, config.activation)
        self.decoder = Decoder(layers, norm, DecoderShape(*sizes))
        head = self.embedding if config.tied else tensors["lm_head.weight"]
        self.head = CpuLinear(make_head(head), tensors.get("lm_head.bias"))
        ropes = [rope.frequencies(config.head_dim) for rope in config.ropes]
        self.frequencies = torch.stack(ropes)  # (G, H / 2)
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        x = F.embedding(batch.ids, self.embedding)
        if self.config.embedding_scale != 1.0:
            x *= self.embedding_scale
        angles = batch.positions[None, :, None].float() * self.frequencies[:, None]
        angles = torch.cat([angles, angles], dim=-1)
        found = self.decoder.run(x, (angles.cos(), angles.sin()), batch, cache, taps=taps)
        return TargetOutput(found.normed, found.features)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V)"""
        logits: Tensor = self.head(hidden)
        if cap := self.config.logit_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _layer(config: Described, weights: Mapping[str, Tensor], make: MakeWeights) -> DecoderLayer:
    """A layer of its tensors by name. Raises KeyError for one that is missing."""
    products = {
        name: CpuLinear(make(weights[f"{path}.weight"]), weights.get(f"{path}.bias"))
        for name, path in PRODUCTS.items()
    }
    paths = SANDWICH_NORMS if config.sandwich else NORMS
    norms = {name: _norm(config, weights[f"{path}.weight"]) for name, path in paths.items()}
    for name, path in QK_NORMS.items():
        if f"{path}.weight" in weights:
            norms[name] = _norm(config, weights[f"{path}.weight"])
    return DecoderLayer(products, norms)


def _norm(config: Described, weight: Tensor) -> Tensor:
    """A norm's weights in float32."""
    return weight.float() + 1 if config.sandwich else weight.float()


class GenericTarget:
    """Any other target: its own code, over native products and native attention."""

    def __init__(self, target: Target) -> None:
        """`target` is a copy: its linear layers are replaced."""
        self.target = target
        replace_linears(self.target.model)
        replace_linears(self.target.head)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        return self.target.forward(batch.ids, batch.positions, CpuAttend(batch, cache), taps)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V)"""
        return self.target.logits(hidden)

"""Described decoders in one native call.

Shapes: T rows, E hidden, F feature layers, R rows, V vocabulary, H head size, G tables of RoPE.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.backends.batch import Batch
from peagle.backends.cpu.decoder import Decoder, DecoderLayer, DecoderShape
from peagle.backends.cpu.matrix import BITS, CpuLinear, Weights
from peagle.backends.cpu.structs import PRODUCTS
from peagle.backends.kv_cache import KVCache
from peagle.model.described import Described, describe
from peagle.model.target import Target, TargetOutput

# A layer's norms by their names in structs.py; those of queries and keys are there or not.
NORMS = {"input": "input_layernorm", "mlp_input": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "input": "input_layernorm",
    "attention": "post_attention_layernorm",
    "mlp_input": "pre_feedforward_layernorm",
    "mlp": "post_feedforward_layernorm",
}
QK_NORMS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}
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
        path: CpuLinear(make(weights[f"{path}.weight"]), weights.get(f"{path}.bias"))
        for path in PRODUCTS
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


def described(target: Target) -> Described | None:
    """The description of a loaded target; None unless it is a model of transformers as it was
    published, whose linear layers are plain."""
    model = target.model
    parts = [model, target.decoder, *target.layers]
    published = all(type(part).__module__.startswith("transformers.models.") for part in parts)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear | CpuLinear)]
    plain = all(type(part) is nn.Linear and part.weight.dtype in BITS for part in linears)
    return describe(target.config.to_dict()) if published and plain else None

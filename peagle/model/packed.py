"""Linear layers that a CPU computes faster, their weights laid out for it.

Shapes: I inputs, O outputs.

An unpacked bf16 product brings its weights into oneDNN's layout in every call. Packed once, it
takes about three quarters of the time at the few rows of decoding; read as they lie by our own
product, on CPUs with AMX, about half. Results are the same, on CPUs with AMX to the last bit.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.model import native
from peagle.model.layers import FirstLayer, Layer, Norm

M = TypeVar("M", bound=nn.Module)
K = TypeVar("K", bound=nn.Module)
ROWS = 8  # oneDNN's layout is chosen for about so many: a verification


class StandIn(nn.Module):
    """In the place of a linear layer, whose weights it holds in another form and in no other. For
    inference: no gradient reaches them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """(O, I) the plain weights, made anew at every call."""
        raise NotImplementedError

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class PackedLinear(StandIn):
    """A linear layer with its weights in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:  # (…, I) → (…, O)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class TiledLinear(nn.Linear):
    """A linear layer with its weights as they are, for our own product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    @property
    def matrix(self) -> native.Matrix:
        return native.Matrix(self.weight, None, 16, self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:  # (…, I) → (…, O)
        if native.usable(x, self.weight):
            return native.linear(x, self.matrix, self.bias)
        return F.linear(x, self.weight, self.bias)


def pack(module: M) -> M:
    """Make the bf16 linear layers of `module`, which must not be trained any more, fast on a CPU;
    returns it. Elsewhere, and on a CPU without bf16 products, they stay."""
    replace(module, nn.Linear, _packed)
    for part in module.modules():
        if isinstance(part, Layer):
            _fuse(part)
    return module


def replace(module: nn.Module, kind: type[K], make: Callable[[K], nn.Module]) -> None:
    """Put `make(layer)` in the place of every layer of a kind in `module`, one after another: the
    weights of one layer at a time exist twice."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:  # what a subclass does is not known
                setattr(parent, name, make(child))


def _fuse(layer: Layer) -> None:
    """Run a layer as one native call from now on, when all of it has become native."""
    at, mlp = layer.self_attn, layer.mlp
    products = [at.q_proj, at.k_proj, at.v_proj, at.o_proj, mlp.gate_proj, mlp.up_proj,
                mlp.down_proj]  # fmt: skip
    read = (getattr(p, "matrix", None) for p in products if p.bias is None)
    matrices = [matrix for matrix in read if matrix is not None]
    if not mlp.silu or len(matrices) < len(products):
        return
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    own = (norm.weight if isinstance(norm, Norm) else None for norm in (at.q_norm, at.k_norm))
    assert first.eps is not None
    feature = layer.hidden_norm.weight if isinstance(layer, FirstLayer) else None
    norms = first.weight, second.weight, *own, feature
    normed = isinstance(layer, FirstLayer) and layer.norm_before_residual
    layer.weights = native.LayerWeights(
        matrices, norms, at.head_dim, first.eps, normed_residual=normed
    )


def _packed(layer: nn.Linear) -> nn.Module:
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return layer
    if native.tiles() and weight.shape[1] % 32 == 0 and weight.shape[0] % 16 == 0:
        return TiledLinear(layer)
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(layer)
    return layer

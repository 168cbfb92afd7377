"""What a CPU computes faster with the weights laid out for it, in the place of `nn.Linear` and
`nn.RMSNorm`.

Shapes: I inputs, O outputs, D hidden.

An unpacked bf16 product brings its weights into oneDNN's layout in every call. Packed once, it
takes about half the time at the few rows of decoding; its result is the same, on CPUs with AMX to
the last bit.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
K = TypeVar("K", bound=nn.Module)
ROWS = 8  # the layout is chosen for about so many: a verification


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


class PackedNorm(nn.Module):
    """RMSNorm as the LayerNorm of x beside −x: their mean is zero, and their variance is the mean
    square of x. torch has one kernel for this on a CPU, and eight for an RMSNorm."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        assert norm.eps is not None
        self.weight, self.eps = norm.weight, norm.eps
        self._twice = torch.cat([self.weight, self.weight]).detach()

    def forward(self, x: Tensor) -> Tensor:  # (…, D)
        both = torch.cat([x, -x], dim=-1)
        normed = F.layer_norm(both, self._twice.shape, self._twice, None, self.eps)
        return normed[..., : len(self.weight)]


def pack(module: M) -> M:
    """Lay the weights of `module`, which must not be trained any more, out for a CPU; returns it.

    Its bf16 linear layers on a CPU that oneDNN has bf16 products for are replaced, and its bf16
    norms there; the others stay.
    """
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replace(module, nn.Linear, lambda layer: PackedLinear(layer) if _fits(layer) else layer)
    replace(module, nn.RMSNorm, lambda norm: PackedNorm(norm) if _fits(norm) else norm)
    return module


def replace(module: nn.Module, kind: type[K], make: Callable[[K], nn.Module]) -> None:
    """Put `make(layer)` in the place of every layer of a kind in `module`, one after another: the
    weights of one layer at a time exist twice."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:  # what a subclass does is not known
                setattr(parent, name, make(child))


def _fits(layer: nn.Linear | nn.RMSNorm) -> bool:
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.bfloat16

"""Weights laid out for the matrix products of a CPU, in the place of `nn.Linear`.

Shapes: I inputs, O outputs.

An unpacked bf16 product brings its weights into oneDNN's layout in every call. Packed once, it
takes about half the time at the few rows of decoding; its result is the same, on CPUs with AMX to
the last bit.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
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


def pack(module: M) -> M:
    """Have `module`, which must not be trained any more, multiply with packed weights; returns it.

    Its bf16 layers on a CPU that oneDNN has bf16 products for are replaced; the others stay.
    """
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replace_linears(module, lambda linear: PackedLinear(linear) if _fits(linear) else linear)
    return module


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put `make(layer)` in the place of every linear layer in `module`, one after another: the
    weights of one layer at a time exist twice."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:  # what a subclass does is not known
                setattr(parent, name, make(child))


def _fits(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.bfloat16

"""Weights as int8 rows, each with a scale: weight[o, i] = q[o, i] · scale[o].

Shapes: I inputs, O outputs.
"""

import torch
from torch import Tensor

SCALE = "_scale"  # ends the name of a matrix's scales, where its rows are stored


def round_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q (O, I) from −127 to 127 and scale (O,) of weights (O, I). The scale is rounded to `dtype`
    before it divides them, so that nothing is lost twice. With scales in bfloat16 float32 holds the
    products exactly, and rounding them again gives the same."""
    # A row may be zeros.
    scale = (weight.float().abs().amax(1) / 127).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    q = weight.float() / scale.float()[:, None]
    return q.round().clamp(-127, 127).to(torch.int8), scale


def restore_int8(q: Tensor, scale: Tensor) -> Tensor:
    """The weights (O, I) in float32."""
    return q.float() * scale.float()[:, None]

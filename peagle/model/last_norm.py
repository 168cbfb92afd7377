"""A target's last norm: all that is computed here when another engine runs the target's layers."""

import torch
from torch import Tensor, nn

from peagle.errors import InputError
from peagle.model.attention import CausalAttend
from peagle.model.target import Target


@torch.no_grad()
def last_norm(target: Target) -> nn.Module:
    """What makes `TargetOutput.hidden` of the residual stream that leaves the last layer.

    It is found by one token: the part of the decoder that ran last. Raises InputError for decoders
    that do anything else after their layers.
    """
    left = list[Tensor]()
    ran = list[tuple[nn.Module, Tensor, Tensor]]()

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        ran.append((module, args[0], out) if args else (module, out, out))

    hooks = [part.register_forward_hook(note) for part in target.decoder.children()]
    hooks.append(target.layers[-1].register_forward_hook(lambda _, __, out: left.append(out)))
    try:
        ids = torch.zeros(1, dtype=torch.int64, device=target.device)
        hidden = target.forward(ids, ids, CausalAttend()).hidden
    finally:
        for hook in hooks:
            hook.remove()
    norm, given, made = ran[-1]
    if given is not left[0] or not torch.equal(made[0, :1], hidden):
        kind = type(target.decoder).__name__
        raise InputError(f"target {target.name} ({kind}): no single norm behind its last layer")
    return norm

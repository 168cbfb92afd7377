"""AdamW, and its learning rate over a run."""

import torch
from torch.nn import Parameter

from peagle.model.drafter import Drafter
from peagle.train.config import TrainConfig


def make_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trained weights. Each group has the peak of its learning rate as `peak`: a
    correction starts from nothing, and learns faster than a head that starts warm."""
    head = list[Parameter]()
    correction = list[Parameter]()
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            group = correction if name.startswith("correction.") else head
            group.append(parameter)
    peaks = ((head, config.lr), (correction, config.correction_lr))
    groups = [{"params": part, "peak": peak} for part, peak in peaks if part]
    # Fused AdamW is one pass over the weights; on two cores it halves the optimizer's share.
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def rate(step: int, total: int, warmup: float, cooldown: float) -> float:
    """Share of the peak learning rate: it rises linearly over the first share `warmup` of the
    steps, stays, and falls linearly to 0 over the last share `cooldown`."""
    warm = max(1, int(total * warmup))
    cool = max(1, int(total * cooldown))
    return min(1.0, (step + 1) / warm, (total - step) / cool)

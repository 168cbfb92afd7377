"""AdamW, its learning rate over a run, and a running average of the weights.

The average smooths the noise of a constant learning rate. It covers a fixed share of the run
so far, so that it needs no length of its own (power-function EMA: Karras et al. 2024,
arXiv 2312.02696, section 3.1).
"""

import torch
from torch import nn

from peagle.model.drafter import Drafter
from peagle.train.config import TrainConfig

EVERY = 8  # steps between updates, from step EVERY² on
GAMMA = 16.0  # the average's width is about 1 / GAMMA of the updates so far


def make_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trained weights. Each group has the peak of its learning rate as `peak`: a
    correction starts from nothing, and learns faster than a head that starts warm."""
    trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    head = [p for name, p in trained if not name.startswith("correction.")]
    correction = [p for name, p in trained if name.startswith("correction.")]
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


class Average:
    """The average of the trained weights of `module`, by name; it begins as these weights."""

    def __init__(self, module: nn.Module) -> None:
        self.now = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        self.weights = {name: p.clone() for name, p in self.now.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps, counted from 1; later only every EVERY-th."""
        gap = 1 if step <= EVERY**2 else EVERY
        if step % gap:
            return
        share = 1 - (1 - gap / step) ** (GAMMA + 1)
        for name, average in self.weights.items():
            average.lerp_(self.now[name], share)

"""A running average of the weights: what a constant learning rate leaves noisy, it smooths.

The average covers a fixed share of the run so far, so that it needs no length of its own
(power-function EMA: Karras et al. 2024, arXiv 2312.02696, section 3.1).
"""

import torch
from torch import Tensor, nn

EVERY = 8  # steps between updates, from step EVERY² on
GAMMA = 16.0  # the average's width is about 1 / GAMMA of the updates so far


class Average:
    """The average of the trained weights of `module`, by name; it begins as these weights."""

    def __init__(self, module: nn.Module) -> None:
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p.detach() for _, p in trained]
        self.weights = {name: p.detach().clone() for name, p in trained}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps, counted from 1; later only every EVERY-th."""
        gap = 1 if step <= EVERY**2 else EVERY
        if step % gap:
            return
        share = 1 - (1 - gap / step) ** (GAMMA + 1)
        for average, parameter in zip(self.weights.values(), self.parameters, strict=True):
            average.lerp_(parameter, share)

    def over(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of the module with the averaged weights in it."""
        return state | self.weights

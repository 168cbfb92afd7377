"""The average of the weights over a run."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from peagle.train.optimizer import EVERY, GAMMA, Average


@pytest.mark.parametrize("steps", [1, 2, 40, 64, 128])
def test_the_average_weighs_steps_by_a_power(steps: int) -> None:
    """Step t has the weight of the integral of tau ** GAMMA from the update before to t. A weight
    that is t after step t has an average of about GAMMA + 1 parts in GAMMA + 2 of the steps."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    average = Average(module)
    for step in range(1, steps + 1):
        nn.init.constant_(module.weight, step)
        average.update(step)
    updates = [t for t in range(steps + 1) if t <= EVERY**2 or t % EVERY == 0]
    shares = [(after ** (GAMMA + 1) - before ** (GAMMA + 1)) for before, after in pairwise(updates)]
    mean = sum(t * share for t, share in zip(updates[1:], shares, strict=True)) / sum(shares)
    assert average.weights["weight"].item() == pytest.approx(mean)
    if steps >= 40:
        assert mean / steps == pytest.approx((GAMMA + 1) / (GAMMA + 2), rel=0.05)

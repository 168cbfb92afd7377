"""Random heads with a correction that changes most drafts."""

from dataclasses import replace

import torch

from peagle.methods.registry import method_of
from peagle.model.config import CorrectionConfig
from peagle.model.drafter import Drafter


def corrected(
    drafter: Drafter, *, spread: float = 1.0, rank: int = 8, candidates: int = 24
) -> Drafter:
    """The same head with a random correction."""
    sizes = CorrectionConfig(rank, candidates)
    config = replace(drafter.config, correction=sizes)
    made = method_of(config).build(config)
    made.load_state_dict(drafter.state_dict(), strict=False)
    if drafter.shared_embedding is not None:
        made.share_embedding(drafter.shared_embedding)
    generator = torch.Generator().manual_seed(5)
    assert made.correction is not None
    with torch.no_grad():
        for parameter in made.correction.parameters():
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return made.to(drafter.norm.weight.dtype).eval()

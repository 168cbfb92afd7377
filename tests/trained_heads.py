"""Heads that are trained for a second or two: some drafts are right, some wrong."""

from pathlib import Path

from peagle.data.example import Example
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.config import TrainConfig
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter


def trained_head(
    target: Target,
    method: str,
    data: list[Example],
    folder: Path,
    *,
    layers: tuple[int, ...] = (1, 2, 3),
) -> Drafter:
    """A head for a tiny target that reads some of its layers."""
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=112, feature_layers=layers)
    drafter = new_drafter(target, [example.ids for example in data], spec)
    Trainer(TrainConfig(folder, steps=160, lr=3e-3), target, drafter, data).run()
    return drafter.eval()

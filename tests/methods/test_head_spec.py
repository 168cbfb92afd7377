"""A head can be made for every family, those whose layers differ in heads too, and run."""

import pytest
import torch
from families import FAMILIES, build
from tiny import METHODS, features_of, make_tokenizer

from peagle.methods.spec import HeadSpec
from peagle.model.attention import CausalAttend
from peagle.model.target import Target
from peagle.train.warm_start import new_drafter


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, method: str) -> None:
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=16, feature_layers=(1, 2, 3))
    target = Target(build(FAMILIES[family]()), make_tokenizer(), family)
    drafter = new_drafter(target, [[5, 6, 7] * 9, list(range(8, 40))], spec)
    assert drafter.config.transformer.hidden_size == target.embedding.shape[1]
    with torch.no_grad():
        features = drafter.project(features_of(target, drafter, [5, 6, 7]))
        ids, attend = torch.tensor([6, 7, 8]), CausalAttend()
        out = drafter(ids, features, torch.arange(3), attend)
        assert drafter.logits(out.normed).isfinite().all()

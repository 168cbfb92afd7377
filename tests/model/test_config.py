"""Contradictions in a drafter's configuration, and the default feature layers."""

from typing import Any

import pytest
from refusals import refused
from tiny_heads import head_config

from peagle.model.config import default_feature_layers


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"feature_layers": ()}, "feature_layers"),
        ({"feature_layers": (2, 2, 3)}, "feature_layers"),
        ({"feature_layers": (3, 2, 1)}, "feature_layers"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc"),
        ({"mask_token_id": None, "embedding": "mask-row"}, "embedding"),
        ({"embedding": "mask-row", "target_hidden_size": 20}, "embedding"),
    ],
)
def test_contradictions(changes: dict[str, Any], field: str) -> None:
    with refused(field):
        head_config(**changes)


@pytest.mark.parametrize(("layers", "wanted"), [(30, (2, 15, 27)), (48, (2, 24, 45))])
def test_default_feature_layers_are_vllms(layers: int, wanted: tuple[int, ...]) -> None:
    assert default_feature_layers(layers) == wanted


@pytest.mark.parametrize("layers", range(1, 7))
def test_shallow_targets_have_no_default_layers(layers: int) -> None:
    with refused("feature_layers"):
        head_config(feature_layers=default_feature_layers(layers))
    head_config(feature_layers=default_feature_layers(7))

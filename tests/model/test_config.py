"""What a drafter's configuration refuses, and the default feature layers."""

from typing import Any

import pytest
from tiny_heads import head_config

from peagle.errors import InputError
from peagle.model.config import default_feature_layers


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"feature_layers": ()}, "strictly ascending.*`feature_layers`"),
        ({"feature_layers": (2, 2, 3)}, "strictly ascending"),
        ({"feature_layers": (3, 2, 1)}, "strictly ascending"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"mask_token_id": None, "embedding": "mask-row"}, "needs a mask token.*'full' or"),
        ({"embedding": "mask-row", "target_hidden_size": 20}, "size 32 cannot share.*size 20"),
    ],
)
def test_contradictions(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as error:
        head_config(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("layers", "wanted"), [(30, (2, 15, 27)), (48, (2, 24, 45))])
def test_default_feature_layers_are_vllms(layers: int, wanted: tuple[int, ...]) -> None:
    assert default_feature_layers(layers) == wanted


@pytest.mark.parametrize("layers", range(1, 7))
def test_shallow_targets_have_no_default_layers(layers: int) -> None:
    with pytest.raises(InputError, match="fewer than 7 layers"):
        head_config(feature_layers=default_feature_layers(layers))
    head_config(feature_layers=default_feature_layers(7))

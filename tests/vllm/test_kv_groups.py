"""Layers whose KV caches vLLM keeps together; test_groups_with_vllm.py compares with vLLM."""

import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from peagle.vllm.kv_groups import Kind, kinds, one_group

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from families import FAMILIES  # noqa: E402

MIXED = ["sliding_attention", "full_attention"] * 12
OWN = Kind("full_attention", 2, 64)


@pytest.mark.parametrize(
    ("types", "draft", "slack", "whole"),
    [
        (["full_attention"] * 8, 4, 1.5, True),
        (MIXED, 1, 1.25, True),
        (MIXED, 4, 1.25, False),  # gpt-oss-20b in vLLM 0.16: 12 and 16
        (MIXED, 4, 1.5, True),  # and in 0.32
        (MIXED, 6, 1.5, False),
        (MIXED[:4], 1, 1.5, True),  # two groups, but a layer is in one
        (["sliding_attention"] * 10 + ["full_attention"] * 2, 4, 1.5, True),
    ],
)
def test_groups_of_kv_cache(types: list[str], draft: int, slack: float, whole: bool) -> None:
    assert one_group([Kind(each, 2, 64) for each in types], OWN, draft, slack) == whole


def test_groups_of_layers_of_other_sizes() -> None:
    """Gemma-4: its full attention has wider heads than a head's layers, which are then of a
    kind of their own; its last layers have no KV cache."""
    sliding, full = Kind("sliding_attention", 2, 64), Kind("full_attention", 1, 128)
    assert not one_group([sliding, OWN] * 3, OWN, 4, 1.5)
    assert one_group([sliding, full] * 3, OWN, 4, 1.5)
    assert one_group([full] * 3, OWN, 4, 1.5), "all hold every position"
    config = FAMILIES["gemma4"]()
    assert kinds(config) == [Kind("sliding_attention", 2, 8), Kind("full_attention", 1, 16)]
    assert kinds(FAMILIES["gpt2"]()) == [Kind("full_attention", 4, 8)] * 4, "says nothing of it"
    assert kinds(LlamaConfig(num_hidden_layers=2)) == [Kind("full_attention", 32, 128)] * 2

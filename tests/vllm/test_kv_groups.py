"""Layers whose KV caches vLLM keeps together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from peagle.vllm.capture import ENVIRONMENT
from peagle.vllm.process import environment, look, older
from peagle.vllm.serve import WIDER_GROUPS, Kind, kinds, one_group

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from families import FAMILIES  # noqa: E402

ASK = """
import json, sys
import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size as group
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

def spec(kind):
    attention, heads, size = kind
    sizes = {"block_size": 16, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    if attention == "full_attention":
        return FullAttentionSpec(**sizes)
    return SlidingWindowSpec(**sizes, sliding_window=128)

found = []
for layers, own, draft in json.loads(sys.argv[1]):
    specs = {f"layers.{i}": spec(kind) for i, kind in enumerate(layers)}
    specs |= {f"draft.{i}": spec(own) for i in range(draft)}
    groups = group(specs)
    ours = [g for g in groups if any(name.startswith("draft") for name in g.layer_names)]
    found.append(len(ours) == 1)
print(json.dumps(found))
"""
OWN, SLIDING = Kind("full_attention", 2, 64), Kind("sliding_attention", 2, 64)
OTHER = Kind("full_attention", 1, 128)  # as many bytes, as vLLM makes pages before it groups
TARGETS = {
    "gpt-oss-20b": [SLIDING, OWN] * 12,
    "gpt-oss-120b": [SLIDING, OWN] * 18,
    "five to one": ([SLIDING] * 5 + [OWN]) * 10,
    "small": [SLIDING, OWN] * 2,
    "mostly full": ([OWN] * 3 + [SLIDING]) * 4,
    "full of other sizes": [SLIDING, OTHER] * 3,
    "gemma-4-31b": ([SLIDING] * 5 + [OTHER]) * 10,
}
MIXED = ["sliding_attention", "full_attention"] * 12


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
    assert not one_group([SLIDING, OWN] * 3, OWN, 4, 1.5)
    assert one_group([SLIDING, OTHER] * 3, OWN, 4, 1.5)
    assert one_group([OTHER] * 3, OWN, 4, 1.5), "all hold every position"
    config = FAMILIES["gemma4"]()
    assert kinds(config) == [Kind("sliding_attention", 2, 8), Kind("full_attention", 1, 16)]
    assert kinds(FAMILIES["gpt2"]()) == [Kind("full_attention", 4, 8)] * 4, "says nothing of it"
    assert kinds(LlamaConfig(num_hidden_layers=2)) == [Kind("full_attention", 32, 128)] * 2


@pytest.mark.vllm
def test_groups_are_those_of_vllm(vllm_python: str) -> None:
    slack = 1.25 if older(look(Path(vllm_python)).version, WIDER_GROUPS) else 1.5
    cases = [(kinds, OWN, draft) for kinds in TARGETS.values() for draft in (1, 2, 4, 6, 8)]
    ours = [one_group(*case, slack) for case in cases]
    command = [vllm_python, "-c", ASK, json.dumps(cases)]
    environ = environment(ENVIRONMENT)
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == ours
    assert {True, False} == set(ours)

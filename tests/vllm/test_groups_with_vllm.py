"""Predicted groups of a head's KV cache are those that vLLM makes.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from peagle.vllm.kv_groups import WIDER_GROUPS, Kind, one_group
from peagle.vllm.process import environment, look

pytestmark = pytest.mark.vllm
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


def test_groups_are_those_of_vllm() -> None:
    python = os.environ.get("PEAGLE_VLLM_PYTHON")
    if not python:
        pytest.skip("PEAGLE_VLLM_PYTHON is not set: `make test-vllm` sets vLLM up and sets it")
    slack = 1.25 if look(Path(python)).before(WIDER_GROUPS) else 1.5
    cases = [(kinds, OWN, draft) for kinds in TARGETS.values() for draft in (1, 2, 4, 6, 8)]
    ours = [one_group(*case, slack) for case in cases]
    run = subprocess.run(
        [python, "-c", ASK, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == ours
    assert {True, False} == set(ours)

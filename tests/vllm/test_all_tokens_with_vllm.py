"""vLLM loads a head that drafts all tokens as we export it; from 0.30 on not one that stores d2t.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target, save_target

from peagle.heads.save import save_drafter
from peagle.vllm.capture import ENVIRONMENT
from peagle.vllm.head import ALL_DRAFTED
from peagle.vllm.process import environment, look, older

pytestmark = pytest.mark.vllm
LOAD = """
import sys
from vllm import LLM
target, head = sys.argv[1:]
config = {"method": "eagle3", "model": head, "num_speculative_tokens": 2}
LLM(target, speculative_config=config, enforce_eager=True, max_model_len=64, dtype="float32")
"""


def test_a_head_that_drafts_all_tokens(tmp_path: Path, vllm_python: str) -> None:
    target = make_target(layers=7)
    head = make_drafter(target, "eagle3", draft_vocab=len(target.embedding))
    head.share_embedding(target.embedding)
    save_drafter(head, tmp_path / "ours", "vllm", dtype=None)
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(file) | {"d2t": torch.zeros_like(head.d2t)}, file)
    folder = save_target(target, tmp_path / "target")
    loads = {}
    environ = environment({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    for name in ("ours", "theirs"):
        command = [vllm_python, "-c", LOAD, str(folder), str(tmp_path / name)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        loads[name] = run.returncode == 0
        assert loads[name] or "draft_id_to_target_id" in run.stderr, run.stderr[-2000:]
    assert loads == {"ours": True, "theirs": older(look(Path(vllm_python)).version, ALL_DRAFTED)}

"""Commands start fast: each imports only the heavy modules that it uses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from corrected_heads import corrected
from runner import LAYERS
from tiny import make_drafter, make_target, save_target

from peagle.cli.main import COMMANDS
from peagle.heads.save import save_drafter

TORCH = ["torch", "transformers", "llguidance", "huggingface_hub"]
OF_TRAINING = ["train", "data", "plan"]  # their options' own modules import torch
# Modelling code, which native targets do without, and what it imports.
MODELLING = [
    "transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "accelerate",
    "scipy", "sympy",
]  # fmt: skip
SERVER = ["fastapi", "uvicorn"]
RUN = """
import json, sys
from peagle.cli.main import main
sys.argv = ["peagle", *sys.argv[1:]]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(json.dumps(sorted(sys.modules)))
"""
SERVE = """
import json, sys
from peagle import LLM
from peagle.server.app import Api, ServerConfig
Api(LLM(sys.argv[2]), ServerConfig("tiny"))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(make_target(layers=LAYERS), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "head"
    drafter = make_drafter(make_target(layers=LAYERS), "p-eagle")
    save_drafter(corrected(drafter), folder)
    return folder


def imported(code: str, *arguments: object) -> set[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


HELP = [[name, "--help"] for name in COMMANDS if name not in OF_TRAINING]


@pytest.mark.parametrize("command", [[], ["--version"], ["--help"], ["catalog"], *HELP])
def test_what_runs_no_model(command: list[str]) -> None:
    assert not imported(RUN, *command) & {*TORCH, *MODELLING, *SERVER}


def test_generate(target: Path, head: Path) -> None:
    modules = imported(RUN, "generate", target, "the cat", "--max-tokens", 2, "--head", head)
    assert "torch" in modules
    assert not modules & {*MODELLING, *SERVER}


def test_serve(target: Path) -> None:
    modules = imported(SERVE, "serve", target)
    assert "fastapi" in modules
    assert not modules & {*MODELLING}

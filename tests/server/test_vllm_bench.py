"""`vllm bench serve` drives the server, and reads its metrics as vLLM's own.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from serving import MODEL, Running
from test_metrics import read

pytestmark = pytest.mark.vllm
# What the command calls: `vllm` itself asks for the version of a package of that name, and the one
# for CPUs has another.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_it_drives_the_server(
    running: Running, vllm_python: str, tmp_path: Path, backend: str, path: str
) -> None:
    running.api.llm.tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "bench.py").write_text(BENCH)
    before = read(running)
    run = subprocess.run(
        [
            vllm_python, tmp_path / "bench.py", "--backend", backend, "--endpoint", path,
            "--base-url", running.url, "--model", MODEL, "--tokenizer", tmp_path / "tokenizer",
            "--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "30",
            "--num-prompts", "12", "--max-concurrency", "4", "--temperature", "0",
            "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json",
        ],
        capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (12, 0, 360)
    now = read(running)
    for name, ours in (("num_drafts", "num_drafts"), ("accepted_tokens", "num_accepted_tokens")):
        at = f"vllm:spec_decode_{ours}_total", ""
        assert told[f"spec_decode_{name}"] == now[at] - before[at] > 0

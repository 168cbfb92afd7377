"""`benchmarks/suite.py`: the one runner, which has a command for every result that is kept."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from peagle.data.records import read_records

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def steps(benchmark_script):
    """Commands by name, and the reasons of those left out."""
    suite = benchmark_script("suite")

    def planned(**given: Any) -> dict[str, Any]:
        args = {"short": False, "mt_bench": None, "vllm_python": None, "device": "cpu"}
        args |= {"qwen": None, "gemma": None} | given
        return {step.name: step for step in suite.steps(Namespace(**args))}

    return planned


def test_every_result_has_its_command(steps) -> None:
    names = [file.stem for file in (BENCHMARKS / "results").glob("*.json")]
    results = {name.removesuffix("_avx2").removesuffix("_amx") for name in names}
    assert results == steps().keys(), "a result without a command goes, and the other way round"
    scripts = [Path(word) for step in steps(device="cuda").values() for word in step.command]
    named = [path for path in scripts if path.suffix == ".py"]
    assert named and [path for path in named if not path.is_file()] == []


def test_options_reach_their_steps(steps) -> None:
    assert not any("--mt-bench" in step.command for step in steps().values())
    found = steps(mt_bench="a set.jsonl", vllm_python="python", device="cuda")
    for name in ("acceptance", "trees"):
        assert found[name].command[-2:] == ["--mt-bench", "a set.jsonl"]
    for name in ("engines", "families", "vllm_correction"):
        assert "--vllm-python" in found[name].command
    for name in ("bench", "training_speed", "bench-gpt-oss-20b"):
        assert "cuda" in found[name].command


def test_speeds_of_kinds_of_cpus_are_kept_apart(benchmark_script, monkeypatch) -> None:
    suite = benchmark_script("suite")
    kinds = (
        ("AVX2", False, "_avx2.json"),
        ("AVX512", False, ".json"),
        ("AVX512", True, "_amx.json"),
    )
    for capability, tiles, ending in kinds:
        monkeypatch.setattr(suite.cpu, "get_cpu_capability", lambda found=capability: found)
        monkeypatch.setattr(suite, "load", lambda tiles=tiles: Namespace(tiles=tiles))
        for step in ("trees", "training_speed"):
            assert suite.file_name(step, "cpu") == f"{step}{ending}"
        assert suite.file_name("acceptance", "cpu") == "acceptance.json"
        assert suite.file_name("bench", "cuda") == "bench.json"


def test_a_context_takes_problems_to_fill_it(benchmark_script) -> None:
    after = benchmark_script("acceptance").after
    problems = ["x" * 100] * 9
    assert {len(text) for [text] in after(problems, 2, 100)} == {320 + 2 + 100}
    with pytest.raises(SystemExit, match="after --limit 7 have no 100 tokens: lower it"):
        after(problems, 7, 100)


def test_what_is_left_out_says_why(steps) -> None:
    assert "name it with --qwen" in steps()["engines_qwen"].missing
    assert steps(qwen="a.gguf")["engines_qwen"].command[-2:] == ["--target", "a.gguf"]
    assert "name it with --vllm-python" in steps()["vllm_correction"].missing
    assert steps(vllm_python="python")["vllm_correction"].missing is None
    short = steps(short=True, vllm_python="python")
    assert {name for name, step in short.items() if step.missing} == {
        "acceptance_context", "acceptance_kinds", "acceptance_trees",
        "engines_gemma", "engines_qwen", "lossless", "training_speed", "vllm_correction",
    }  # fmt: skip


def test_a_step_that_is_none(benchmark_script, monkeypatch, capsys) -> None:
    """Nothing runs, and no table is written again."""
    suite = benchmark_script("suite")
    ran = Mock()
    monkeypatch.setattr(suite.subprocess, "run", ran)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--only", "bnech"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2 and not ran.called
    assert "--only bnech: choose from bench, acceptance_trees" in capsys.readouterr().err


@pytest.mark.parametrize("complete", [True, False])
def test_a_run_that_was_cut_short_has_no_table(
    benchmark_script, monkeypatch, tmp_path: Path, complete: bool
) -> None:
    tables = benchmark_script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps({"complete": complete, "rows": []}))
    found = tables.lines_of({"bench": ("Loads", lambda report: ["a table"])})
    assert ("a table" in found) == bool(found) == complete


STEPS = """
import torch
import torch.nn.functional as F
from training_speed import run_steps
from peagle.train import passes

class Row:
    def step(self, *, count):
        seen.append((count, F.linear is passes.LINEAR))

seen = []
passes.multiplies_bf16 = lambda device: False
run_steps([Row()], 2, torch.device("cpu"))
assert seen == [(False, False)] * 3 + [(True, False)] + [(False, False)] * 2
assert F.linear is passes.LINEAR and not torch.backends.cuda.cudnn_sdp_enabled()
"""


def test_training_speed_is_that_of_the_trainer() -> None:
    """Its steps run as the trainer's do, on a CPU without products of bf16, too."""
    subprocess.run([sys.executable, "-c", STEPS], cwd=BENCHMARKS, check=True)


def test_training_speed_has_documents(tmp_path: Path) -> None:
    """Without --data: those of a clone. In a process of its own: tests have an `answers`, too."""
    output = tmp_path / "synth.jsonl"
    unpack = "from training_speed import *; unpack_synth(HEADS / 'answers.jsonl.gz', Path({!r}))"
    command = [sys.executable, "-c", unpack.format(str(output))]
    subprocess.run(command, cwd=BENCHMARKS, check=True)
    lines = list(read_records(output))
    assert len(lines) >= 32, "as many as it trains on"
    assert all(line["prompt_ids"] and line["answer_ids"] for line in lines)

"""`benchmarks/random_weights.py`: sizes are the published ones, acceptance is the given one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import METHODS
from transformers import AutoModelForCausalLM

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
PARAMETERS = {  # in thousand millions, as their model cards say
    "openai/gpt-oss-20b": 20.9,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.5,
    "google/gemma-4-31B-it": 30.7,
}
SMALLER = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 512, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def script(benchmark_script):
    return benchmark_script("random_weights")


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items())
def test_shapes_have_the_published_size(script, name: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(script.read_shape(name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize("length", [1.0, 1.8, 3.03, 3.94, 6.5])
def test_a_profile_has_its_acceptance_length_at_seven(script, length: float) -> None:
    shares = script.profile(length)
    assert 1 + sum(shares[:7]) == pytest.approx(length)
    assert shares == sorted(shares, reverse=True) and len(shares) >= 18
    assert shares[17] == pytest.approx(shares[0] ** 18)


def shrunk(name: str, tmp_path: Path) -> str:
    """A shipped shape with narrower and fewer layers."""
    file = SHAPES / f"{name.split('/')[1].lower()}.json"
    shape = json.loads(file.read_text())
    shape |= {key: value for key, value in SMALLER.items() if key in shape}
    shape["num_hidden_layers"] = 7
    if "layer_types" in shape:
        shape["layer_types"] = list(shape["layer_types"])[:6] + ["full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "method", "k"),
    [
        *(("openai/gpt-oss-20b", method, k) for method in METHODS for k in (5, 18)),
        *((name, "p-eagle", 5) for name in PARAMETERS if name != "openai/gpt-oss-20b"),
    ],
)
def test_drafts_are_accepted_as_often_as_given(  # noqa: PLR0913, PLR0917 (fixtures)
    script, tmp_path: Path, name: str, method: str, k: int, recwarn: pytest.WarningsRecorder
) -> None:
    target = script.random_target(shrunk(name, tmp_path), dtype=torch.float32)
    drafter = script.random_drafter(target, method, draft_vocab=128)
    llm = LLM(target, drafter, k=k, max_batch=8, kv_tokens=4096)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    given = script.profile(3.94)

    found = script.Synthetic(llm, params, 9, given).play([[str(i)] for i in range(16)], 8)
    assert [s.tokens for s in found.samples] == [100] * 16
    shares = found.drafting.accepted_per_position
    assert shares == pytest.approx(given[:k], abs=0.08)  # about 450 rounds
    assert found.drafting.rounds > 300
    assert not [w for w in recwarn if "draft tokens" in str(w.message)], "the head is that deep"


def test_the_script_measures_every_method_and_load(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, output = shrunk("openai/gpt-oss-20b", tmp_path), tmp_path / "shape.json"
    options = "--k 3 --concurrency 1,4 --limit 1 --prompt-tokens 9 --max-tokens 40 --device cpu"
    line = [small, *options.split(), "--acceptance", "p-eagle=3.0,eagle3=2.0"]
    monkeypatch.setattr(sys, "argv", ["random_weights.py", *line, "--output", str(output)])
    script.main()
    report = json.loads(output.read_text())
    rows = {(row["method"], row["concurrency"]): row for row in report["rows"]}
    assert report["complete"] and len(rows) == len(report["rows"]) == 3 * 2
    assert report["settings"]["conversations"] == 4, "as many as run at a time"
    for load in (1, 4):
        parallel, one_by_one = rows["p-eagle", load], rows["eagle3", load]
        assert parallel["acceptance_length"] > one_by_one["acceptance_length"] > 1.3
        assert rows["none", load]["output_tokens"] == parallel["output_tokens"] == 4 * 40


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (("no-such-shape",), "no such shape"),
        (("openai/gpt-oss-20b", "--acceptance", "p-eagle=9"), "must be 1 to below 8"),
        (("openai/gpt-oss-20b", "--acceptance", "p-eagle"), "invalid lengths value"),
    ],
)
def test_bad_input(script, line: tuple[str, ...], why: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["random_weights.py", *line])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and why in capsys.readouterr().err

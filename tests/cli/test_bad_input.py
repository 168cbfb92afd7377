"""What users get wrong: one line on stderr that names it and the way out, and exit code 2."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from runner import save_target, write_lines
from safetensors.torch import load_file, save_file

SAY = ("hi", "--max-tokens", 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("  ",), ["PROMPT is empty", "give a text"]),
        (("the cat " * 300,), ["tokens", "takes 256", "shorten it"]),
        ((*SAY, "--k", 0), ["--k 0: ", "at least 1"]),
        ((*SAY, "--temperature", -0.5), ["--temperature -0.5", "0 (greedy) to 100"]),
        ((*SAY, "--top-p", 0), ["--top-p 0.0", "above 0 and at most 1"]),
        ((*SAY, "--frequency-penalty", -3), ["--frequency-penalty -3.0", "-2 to 2"]),
        ((*SAY, "--stop", ""), ["--stop ''", "must not be empty"]),
        ((*SAY, "--logprobs", 2), ["--logprobs 2", "add --json"]),
        ((*SAY, "--json", "--logprobs", -1), ["--logprobs -1", "or more"]),
        ((*SAY, "--regex", "a("), ["--regex 'a('", "unclosed group"]),
        ((*SAY, "--json-schema", "./nowhere"), ["--json-schema nowhere", "no such file"]),
        ((*SAY, "--json-schema", sys.executable), ["--json-schema", "not UTF-8"]),
        ((*SAY, "--json-schema", __file__), ["--json-schema: not JSON", "give a schema"]),
        ((*SAY, "--dtype", "int3"), ["--dtype 'int3'", "float32", "bfloat16"]),
        ((*SAY, "--quantize", "int3"), ["--quantize 'int3'", "int8 or int4"]),
        ((*SAY, "--method", "medusa"), ["--method 'medusa'", "p-eagle, eagle3, lookup, none"]),
        ((*SAY, "--method", "eagle3"), ["no eagle3 head", "--head"]),
        ((*SAY, "--head", "./nowhere"), ["--head nowhere", "give a folder or a hub id"]),
    ],
)
def test_generate_options(refused, target: Path, options: tuple[object, ...], said) -> None:
    line = refused("generate", target, *options)
    assert all(part in line for part in said), line


@pytest.mark.parametrize("share", [0, 1.5])
def test_plan_for_no_answers(refused, share: float) -> None:
    line = refused("plan", "anything", "--tokens", 9, "--context", 9, "--answered", share)
    assert f"--answered {float(share)}: must be above 0, at most 1" in line


@pytest.mark.parametrize("command", ["generate", "chat", "train", "eval", "data regenerate"])
def test_unknown_model(refused, command: str, answers: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"turns": ["hi"]})
    options = {
        "generate": SAY,
        "train": ("--data", answers, "--output", tmp_path / "out"),
        "eval": ("--dataset", prompts),
        "data regenerate": ("--prompts", prompts, "--output", tmp_path / "made.jsonl"),
    }
    line = refused(*command.split(), "smollm3", *options.get(command, ()))
    assert "'smollm3': unknown model" in line
    assert "smollm2-135m" in line


def test_target_folder_without_config(refused, tmp_path: Path) -> None:
    assert "the folder has no config.json" in refused("generate", tmp_path, *SAY)


def test_corrupt_target(refused, tmp_path: Path) -> None:
    folder = save_target(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "target '" in refused("generate", folder, *SAY)


def test_head_for_another_target(refused, other_target: Path, heads: dict[str, Path]) -> None:
    line = refused("generate", other_target, *SAY, "--head", heads["p-eagle"])
    assert "does not fit" in line
    assert "weights hash" in line
    assert "--force" in line


def test_method_of_the_head(refused, target: Path, heads: dict[str, Path]) -> None:
    head = ("--head", heads["eagle3"])
    line = refused("generate", target, *SAY, *head, "--method", "p-eagle")
    assert f"--head {heads['eagle3']}: its method is eagle3, not p-eagle" in line


@pytest.mark.parametrize("command", ["doctor", "export", "generate", "eval", "bench", "serve"])
def test_a_run_folder_in_the_place_of_its_head(
    refused, target: Path, tmp_path: Path, command: str
) -> None:
    run = tmp_path / "mine"
    (run / "head").mkdir(parents=True)
    (run / "head" / "config.json").write_text("{}")
    prompts = write_lines(tmp_path / "prompts.jsonl", {"turns": ["hi"]})
    options: dict[str, tuple[object, ...]] = {
        "doctor": (run, target),
        "export": (run, tmp_path / "made", "--to", "vllm"),
        "generate": (target, *SAY, "--head", run),
        "eval": (target, "--dataset", prompts, "--head", run),
        "bench": (target, "--dataset", prompts, "--methods", "p-eagle", "--p-eagle", run),
        "serve": (target, "--head", run, "--engine", "native"),
    }
    line = refused(command, *options[command])
    assert f"{run}: no config.json; did you mean {run / 'head'}?" in line
    assert ("--head" in line) == (command in ("generate", "eval", "serve"))


def test_damaged_head(refused, target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    """Of many kinds: heads/test_format_errors.py and tools/test_doctor.py."""
    head = shutil.copytree(heads["p-eagle"], tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file(
        tensors | {"norm.weight": tensors["norm.weight"][:7].clone()}, head / "model.safetensors"
    )
    line = refused("generate", target, *SAY, "--head", head)
    assert "size mismatch for norm.weight" in line and str(head) in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "medusa"), ["--method 'medusa'", "p-eagle or eagle3"]),
        (("--depths", 0), ["--depths 0", "at least 1"]),
        (("--lr", 0), ["--lr 0.0", "above 0"]),
        (("--max-length", 2), ["--max-length 2", "at least 4"]),
        (("--feature-layers", "1,x"), ["--feature-layers '1,x'", "whole numbers"]),
        (("--feature-layers", "3,1"), ["feature-layers [3, 1]", "ascending"]),
        (("--feature-layers", "1,99"), ["feature-layers [1, 99]", "0 to 6"]),
        (("optimizer=adam",), ["setting 'optimizer': unknown; known are data, "]),
        (("eval_evry=3",), ["'eval_evry': unknown; did you mean eval_every? Known are data"]),
        (("--warmup", 1), ["--warmup 1.0: must be at least 0 and below 1"]),
        (("warm_start=maybe",), ["setting warm_start 'maybe': expected true or false"]),
        (("steps=many",), ["setting steps 'many'", "a whole number"]),
        (("steps",), ["'steps'", "name=value"]),
    ],
)
def test_train_options(refused, target: Path, answers: Path, tmp_path: Path, options, said) -> None:
    where = ("--data", answers, "--output", tmp_path / "out")
    line = refused("train", target, *where, *options)
    assert all(part in line for part in said), line
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        (
            "learning_rate: 1",
            "setting 'learning_rate': unknown; known are data, ",
        ),
        ("lr: fast", "setting lr 'fast': expected a number"),
        ("- a\n- b", "expected name: value lines"),
        ("a: [", "not YAML"),
    ],
)
def test_train_yaml(refused, target: Path, tmp_path: Path, yaml: str, said: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml)
    assert said in refused("train", target, "--config", config)


def test_train_init_from_the_other_method(
    refused, target: Path, answers: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    where = ("--data", answers, "--output", tmp_path)
    line = refused("train", target, *where, "--init-from", heads["eagle3"])
    assert "--method p-eagle: the head of --init-from is eagle3" in line


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"prompt_ids": [5], "answer_ids": [6, 7, 8]}\n{"half', ":2: not JSON"),
        ("[1]\n", ":1: expected a JSON object, found list"),
        (
            '{"messages": [{"role": "user", "content": "hi"}]}\n',
            "record 1: the conversation",
        ),
        ('{"prompt_ids": [5, 6], "answer_ids": []}\n', "no answer to train on within --max-length"),
        ("", "no records: the file is empty"),
    ],
)
def test_training_data(refused, target: Path, tmp_path: Path, lines: str, said: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    line = refused("train", target, "--data", data, "--output", tmp_path / "out")
    assert said in line
    assert str(data) in line


def test_train_needs_data_and_output(refused, target: Path, tmp_path: Path) -> None:
    assert "--data is missing: name a" in refused("train", target, "--output", tmp_path)
    nowhere = tmp_path / "nowhere.jsonl"
    assert "--output is missing: name a" in refused("train", target, "--data", nowhere)
    line = refused("train", target, "--data", nowhere, "--output", tmp_path)
    assert f"--data {nowhere}: no such file" in line


def test_prompt_files(refused, target: Path, tmp_path: Path) -> None:
    bad = tmp_path / "prompts.jsonl"
    bad.write_text(json.dumps({"turns": ["hi"]}) + "\nnot json\n")
    made = ("--output", tmp_path / "made.jsonl")
    assert f"{bad}:2: not JSON" in refused("data", "regenerate", target, "--prompts", bad, *made)
    assert f"{bad}:2: not JSON" in refused("eval", target, "--dataset", bad)
    assert not made[1].exists()

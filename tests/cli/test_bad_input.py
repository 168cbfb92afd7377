"""Mistakes of users: one line on stderr that names the field and the fix, and exit code 2."""

import sys
from pathlib import Path

import pytest
from json_files import write_lines
from runner import Words

SAY = ("hi", "--max-tokens", 4)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("  ",), "prompt"),
        (("the cat " * 300,), None),
        ((*SAY, "--k", 0), "k"),
        ((*SAY, "--temperature", -0.5), "temperature"),
        ((*SAY, "--top-p", 0), "top_p"),
        ((*SAY, "--frequency-penalty", -3), "frequency_penalty"),
        ((*SAY, "--stop", ""), "stop"),
        ((*SAY, "--logprobs", 2), "logprobs"),
        ((*SAY, "--show-tree", "--json"), "show_tree"),
        ((*SAY, "--json", "--logprobs", -1), "logprobs"),
        ((*SAY, "--regex", "a("), "regex"),
        ((*SAY, "--json-schema", "./nowhere"), "json_schema"),
        ((*SAY, "--json-schema", sys.executable), "json_schema"),
        ((*SAY, "--json-schema", __file__), "json_schema"),
        ((*SAY, "--dtype", "int3"), "dtype"),
        ((*SAY, "--quantize", "int3"), "quantize"),
        ((*SAY, "--method", "medusa"), "method"),
        ((*SAY, "--method", "eagle3"), None),
        ((*SAY, "--head", "./nowhere"), "head"),
        # Options that cancel each other.
        ((*SAY, "--k", 5), "k"),
        ((*SAY, "--method", "none", "--k", 5), "k"),
        ((*SAY, "--method", "lookup", "--k", 5), "k"),
        ((*SAY, "--method", "lookup", "--no-lookup"), "no_lookup"),
        ((*SAY, "--method", "lookup", "--head", "owner/head"), "head"),
        ((*SAY, "--no-speculation", "--head", "owner/head"), "head"),
        ((*SAY, "--no-speculation", "--method", "lookup"), "method"),
        ((*SAY, "--no-speculation", "--k", 5), "k"),
        ((*SAY, "--no-speculation", "--nodes", 5), "nodes"),
    ],
)
def test_generate_options(refused, target: Path, options: Words, field: str | None) -> None:
    refused("generate", target, *options, field=field)


@pytest.mark.parametrize("share", [0, 1.5])
def test_plan_for_no_answers(refused, share: float) -> None:
    options = ("--tokens", 9, "--context", 9, "--answered", share)
    refused("plan", "anything", *options, field="answered")


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


def test_head_for_another_target(refused, other_target: Path, heads: dict[str, Path]) -> None:
    line = refused("generate", other_target, *SAY, "--head", heads["p-eagle"])
    assert "does not fit" in line
    assert "weights hash" in line
    assert "--force" in line


def test_method_of_the_head(refused, target: Path, heads: dict[str, Path]) -> None:
    head = ("--head", heads["eagle3"])
    refused("generate", target, *SAY, *head, "--method", "p-eagle", field="head")


@pytest.mark.parametrize("command", ["doctor", "export", "generate", "eval", "bench", "serve"])
def test_a_run_folder_for_its_head(refused, target: Path, tmp_path: Path, command: str) -> None:
    run = tmp_path / "mine"
    (run / "head").mkdir(parents=True)
    (run / "head" / "config.json").write_text("{}")
    prompts = write_lines(tmp_path / "prompts.jsonl", {"turns": ["hi"]})
    options: dict[str, Words] = {
        "doctor": (run, target),
        "export": (run, tmp_path / "made", "--to", "vllm"),
        "generate": (target, *SAY, "--head", run),
        "eval": (target, "--dataset", prompts, "--head", run),
        "bench": (target, "--dataset", prompts, "--methods", "p-eagle", "--p-eagle", run),
        "serve": (target, "--head", run, "--engine", "native"),
    }
    line = refused(command, *options[command])
    assert f"did you mean {run / 'head'}?" in line


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--method", "medusa"), "method"),
        (("--depths", 0), "depths"),
        (("--lr", 0), "lr"),
        (("--max-length", 2), "max_length"),
        (("--feature-layers", "1,x"), "feature_layers"),
        (("--feature-layers", "3,1"), "feature_layers"),
        (("--feature-layers", "1,99"), "feature_layers"),
        (("--warmup", 1), "warmup"),
        (("--seed", 2**40), "seed"),
        (("--norm-output",), "norm_output"),
        (("--correction-lr", 0.1), "correction_lr"),
        (("--method", "eagle3", "--compile"), "compile"),
    ],
)
def test_train_options(refused, training: Words, tmp_path: Path, options, field: str) -> None:
    refused(*training, "--output", tmp_path / "out", *options, field=field)
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("yaml", "field"),
    [
        ("learning_rate: 1", "learning_rate"),
        ("eval_evry: 3", "eval_evry"),
        ("lr: fast", "lr"),
        ("- a\n- b", "config"),
        ("a: [", "config"),
        ("output: 2024-13-45", "config"),  # no date
    ],
)
def test_train_yaml(refused, target: Path, tmp_path: Path, yaml: str, field: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml)
    refused("train", target, "--config", config, field=field)


@pytest.mark.parametrize(
    ("head", "options", "field"),
    [
        ("eagle3", (), "method"),
        ("eagle3", ("--correction", "frozen"), "method"),
        ("p-eagle", ("--layers", 1), "layers"),
        ("p-eagle", ("--feature-layers", "1,2,3"), "feature_layers"),
        ("p-eagle", ("--feature-layers", "1,2,3", "--correction", "frozen"), "feature_layers"),
        ("p-eagle", ("--draft-vocab", 100), "draft_vocab"),
        ("p-eagle", ("--embedding", "full"), "embedding"),
        ("p-eagle", ("--no-warm-start",), "warm_start"),
        ("p-eagle", ("--depths", 3, "--correction", "frozen"), "depths"),
        ("p-eagle", ("--fc-norm", "--correction", "frozen"), "fc_norm"),
        ("p-eagle", ("--norm-output",), "norm_output"),
        ("p-eagle", ("--correction-lr", 0.1), "correction_lr"),
    ],
)
def test_train_init_from_another_head(  # noqa: PLR0913, PLR0917 (fixtures)
    refused,
    training: Words,
    heads: dict[str, Path],
    tmp_path: Path,
    head: str,
    options: Words,
    field: str,
) -> None:
    """Than the options describe."""
    start = ("--init-from", heads[head], *options)
    refused(*training, "--output", tmp_path, *start, field=field)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"prompt_ids": [5], "answer_ids": [6, 7, 8]}\n{"half', ":2: not JSON"),
        ("[1]\n", ":1: expected a JSON object, found list"),
        ('{"messages": [{"role": "user", "content": "hi"}]}\n', "record 1: the conversation"),
        ('{"prompt_ids": [5, 6], "answer_ids": []}\n', "no answer to train on within"),
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
    refused("train", target, "--output", tmp_path, field="data")
    nowhere = tmp_path / "nowhere.jsonl"
    refused("train", target, "--data", nowhere, field="output")
    refused("train", target, "--data", nowhere, "--output", tmp_path, field="data")


def test_prompt_files(refused, target: Path, tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "prompts.jsonl", {"turns": ["hi"]}, "not json")
    made = ("--output", tmp_path / "made.jsonl")
    assert f"{bad}:2: not JSON" in refused("data", "regenerate", target, "--prompts", bad, *made)
    assert f"{bad}:2: not JSON" in refused("eval", target, "--dataset", bad)
    assert not made[1].exists()

"""`peagle train`: from a JSONL file to a head; settings, resuming, stopping."""

import dataclasses
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from json_files import change_json, read_json
from runner import SMALL, Words, invoke, metrics, printed
from tiny import METHODS

from peagle.cli import train
from peagle.cli.main import load_command
from peagle.cli.options import documented
from peagle.data.documents import Documents
from peagle.data.synth import SynthConfig
from peagle.errors import InputError
from peagle.locks import held
from peagle.model.drafter import Drafter
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.train import warm_start
from peagle.train.config import TrainConfig
from peagle.train.spec import DEPTHS, HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.walk import HELD_OUT


@pytest.mark.parametrize("method", METHODS)
def test_run_leaves_head_checkpoint_and_metrics(runs: dict[str, Path], method: str) -> None:
    lines = metrics(runs[method])
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (runs[method] / "checkpoints" / "step-00000060" / "state.safetensors").is_file()
    config = read_json(runs[method] / "head" / "config.json")
    assert config["num_hidden_layers"] == 2
    assert ("ptd_token_id" in config) == (method == "p-eagle")
    assert config["peagle"]["depths"] == 4
    assert config["peagle"]["provenance"]["data"] == {
        "answer_tokens": lines[-1]["answer_tokens"],
        "steps": 60,
    }


def test_a_checkpoint_is_refused_then_resumed(training: Words, tmp_path: Path, refused) -> None:
    command = (*training, "--output", tmp_path, *SMALL, "--steps")
    invoke(*command, 3)
    assert "--resume" in refused(*command, 5, field="output")
    assert len(metrics(tmp_path)) == 3
    invoke(*command, 5, "--resume")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_resume_needs_a_checkpoint(training: Words, tmp_path: Path, refused) -> None:
    command = (*training, "--output", tmp_path, *SMALL)
    refused(*command, "--resume", field="resume")
    invoke(*command, "--resume", "auto", "--steps", 2)
    invoke(*command, "--resume", "auto", "--steps", 3)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    line = refused(*command, "--resume", "auto", "--steps", 4, "--seed", 9)
    assert "--seed 9: was 0 when the run began" in line
    invoke(*command, "--steps", 4, "--resume", "--lr", "1e-3")


def test_data_are_not_written_for_a_checkpoint_that_is_not_there(
    target: Path, tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "synthesize", Mock(side_effect=AssertionError))
    command = ("train", target, "--data", "synth", "--output", tmp_path / "typo", *SMALL)
    refused(*command, "--resume", field="resume")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_writes(training: Words, tmp_path: Path, refused) -> None:
    command = (*training, "--output", tmp_path, *SMALL, "--steps", 1)
    with held(tmp_path):
        refused(*command, field="output")
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()
    invoke(*command)


def test_a_run_is_not_continued_with_other_answers_to_measure_on(
    training: Words, answers: Path, tmp_path: Path, refused
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(answers.read_text().splitlines(keepends=True)[:3]))
    command = (*training, "--output", tmp_path / "out", *SMALL)
    invoke(*command, "--held-out", answers, "--steps", 1)
    refused(*command, "--held-out", few, "--steps", 2, "--resume", field="held_out")
    invoke(*command, "--held-out", answers, "--steps", 2, "--resume")


def test_answers_to_prompts_that_are_trained_on_are_not_measured(
    target: Path, answers: Path, tmp_path: Path
) -> None:
    """As greedy and sampled answers to the same prompts."""
    twice = tmp_path / "twice.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    twice.write_text("".join(line * 2 for line in lines))
    command = ("train", target, "--data", twice, "--output", tmp_path / "out", *SMALL)
    said = invoke(*command, "--steps", 1).stderr
    assert "too few documents have their own prompt: acceptance is not measured" in said
    assert "acceptance_length" not in metrics(tmp_path / "out")[0]


def test_held_out_answers_do_not_choose_the_vocabulary(
    training: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[int]()

    def new_drafter(made_for: Target, made_from: Any, spec: HeadSpec, known: Any) -> Drafter:
        made_from = list(made_from)
        counted.append(len(made_from))
        return warm_start.new_drafter(made_for, made_from, spec, known)

    monkeypatch.setattr(train, "new_drafter", new_drafter)
    invoke(*training, "--output", tmp_path, *SMALL, "--steps", 1)
    assert counted == [22], "of 24 documents two are held out"


def test_a_plan_says_what_its_hours_leave_out(target: Path, runs: dict[str, Path]) -> None:
    sizes = ("--tokens", 9000, "--context", 64, "--run", runs["p-eagle"], "--price", 2)
    said = invoke("plan", target, *sizes).stdout
    assert "an hour and device, without measurements and checkpoints" in said


def test_a_run_is_not_continued_for_another_target(
    training: Words, other_target: Path, answers: Path, tmp_path: Path, refused
) -> None:
    invoke(*training, "--output", tmp_path, *SMALL, "--steps", 1)
    other = ("train", other_target, "--data", answers, "--output", tmp_path, *SMALL)
    line = refused(*other, "--steps", 2, "--resume", field="target")
    assert "when the run began" in line


def test_shard_says_what_it_needs(
    training: Words, tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*training, "--output", tmp_path, *SMALL, "--shard")
    refused(*command, field="shard")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "this torch sees no CUDA device" in refused(*command, "--device", "cuda")


def test_settings_in_rising_order(
    target: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(answers, tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: ~/{answers.name}\noutput: ~/out\nsteps: 4\ndepths: 7\nlr: 6e-4\nlayers: 1\n"
        "feature_layers: [1, 3, 5]\nepochs: null\ndraft_vocab: 100\n"
    )
    invoke("train", target, "--depths", 3, "--config", config)
    head = read_json(tmp_path / "out" / "head" / "config.json")
    assert head["peagle"]["depths"] == 3
    assert head["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert head["draft_vocab_size"] == 100
    lines = metrics(tmp_path / "out")
    assert len(lines) == 4
    assert lines[0]["lr"] == 6e-4


def test_recipe_of_the_paper_is_overridden_by_all_else(
    target: Path, training: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused
) -> None:
    lengths, specs, configs = list[int](), list[HeadSpec](), list[TrainConfig]()

    def read(files: object, model: Target, max_length: int, strict: bool) -> Documents[Any]:
        lengths.append(max_length)
        return Documents([])

    def drafter(start: object, model: Target, spec: HeadSpec, *_: object) -> Mock:
        specs.append(spec)
        return Mock()

    def trainer(config: TrainConfig, *rest: object) -> Trainer:
        configs.append(config)
        raise InputError("seen enough")

    monkeypatch.setattr(train, "_read", read)
    monkeypatch.setattr(train, "_drafter", drafter)
    monkeypatch.setattr(train, "_split", lambda *_: ([], [0]))
    monkeypatch.setattr(train, "Trainer", trainer)
    config = tmp_path / "run.yaml"
    config.write_text("lr: 2e-4\n")
    command = (*training, "--output", tmp_path / "out", "--steps", 1)
    layers = read_json(target / "config.json")["num_hidden_layers"]

    refused(*command, "--recipe", "paper")
    settings = configs[-1]
    assert (settings.ratio, settings.decay) == (0.8, 1.0)
    assert (settings.lr, settings.warmup, settings.batch) == (1e-4, 0.0025, 8)
    assert lengths[-1] == 8192
    assert specs[-1].embedding == "full"
    assert specs[-1].feature_layers == (2, layers // 2, layers - 1)

    own = ("--ratio", 0.6, "--batch", 2, "--feature-layers", "1,2,3", "--max-length", 64)
    recipe, file = ("--recipe", "paper"), ("--config", config)
    for order in (recipe + file, file + recipe):
        refused(*command, *order, *own)
        settings = configs[-1]
        assert (settings.lr, settings.ratio, settings.batch) == (2e-4, 0.6, 2)
        assert (settings.warmup, lengths[-1]) == (0.0025, 64)
        assert (specs[-1].feature_layers, specs[-1].embedding) == ((1, 2, 3), "full")
    config.write_text("recipe: paper\n")
    refused(*command, "--config", config)
    assert configs[-1].batch == 8
    refused(*command, "--recipe", "papers", field="recipe")


def test_settings_of_the_schedule_and_the_start(
    training: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, specs = list[object](), list[HeadSpec]()

    def new_drafter(made_for: Target, made_from: Any, spec: HeadSpec, known: Any) -> Drafter:
        specs.append(spec)
        return warm_start.new_drafter(made_for, made_from, spec, known)

    monkeypatch.setattr("peagle.train.trainer.compile_layers", compiled.append)
    monkeypatch.setattr(train, "new_drafter", new_drafter)
    config = tmp_path / "run.yaml"
    config.write_text(
        "warmup: 0.5\nwarm_start: false\ncompile: false\nsave_every: 1\nkeep: 1\nratio: 1\n"
        "cooldown: 0.5\nsegments: auto\n"
    )
    command = (*training, *SMALL, "--steps", 4)
    invoke(*command, "--output", tmp_path / "file", "--config", config)
    lines = metrics(tmp_path / "file")
    assert [line["lr"] for line in lines] == pytest.approx([15e-4, 3e-3, 3e-3, 15e-4])
    saved = [folder.name for folder in (tmp_path / "file" / "checkpoints").iterdir()]
    assert saved == ["step-00000004"] and not compiled
    flags = ("--warmup", 0.25, "--warm-start", "--compile", "--segments", "auto")
    invoke(*command, "--output", tmp_path / "flags", "--config", config, *flags)
    assert metrics(tmp_path / "flags")[0]["lr"] == 3e-3 and len(compiled) == 1
    assert [spec.warm_start for spec in specs] == [False, True]


def test_every_setting_is_an_option() -> None:
    known = {option.name for option in load_command("train").params}
    fields = (*dataclasses.fields(TrainConfig), *dataclasses.fields(HeadSpec))
    assert {field.name for field in fields} <= known


def test_help_is_in_panels_and_plain_words() -> None:
    options = [each for each in load_command("train").params if each.opts[0].startswith("--")]
    panels = Counter(each.rich_help_panel for each in options)  # type: ignore[attr-defined]
    assert set(panels) == {"Data", "Run", "Recipe", "Machine", "Head", "Model"}
    assert max(panels.values()) <= 12
    texts = " ".join(each.help for each in options if each.help)  # type: ignore[attr-defined]
    assert not any(word in texts for word in ("COD", "elements", "of vLLM", "r_min"))


def test_help_has_the_defaults_that_are_used() -> None:
    texts = documented(train.Start)
    assert f"Default: {train.MAX_LENGTH}." in texts["max_length"][0]
    assert f"Default: {HELD_OUT} documents" in texts["held_out"][0]
    assert f"Default: {DEPTHS}." in documented(HeadSpec)["depths"][0]


def test_eagle3_has_one_layer_unless_told(training: Words, tmp_path: Path) -> None:
    command = (*training, "--steps", 1, "--draft-vocab", 100)
    invoke(*command, "--output", tmp_path / "one", "--method", "eagle3", "--depths", 2)
    invoke(*command, "--output", tmp_path / "four", "--depths", 2)
    layers = [
        read_json(tmp_path / name / "head" / "config.json")["num_hidden_layers"]
        for name in ("one", "four")
    ]
    assert layers == [1, 4]


def test_init_from_another_targets_head_makes_one_for_this_target(
    other_target: Path, answers: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    start = ("--init-from", heads["p-eagle"], "--depths", 3, "--steps", 1, "--lr", "1e-9")
    invoke("train", other_target, "--data", answers, "--output", tmp_path, *start)
    head = tmp_path / "head"
    config = read_json(head / "config.json")
    assert config["peagle"]["depths"] == 3
    assert config["peagle"]["provenance"]["target"] == str(other_target)
    assert config["num_hidden_layers"] == 2  # the head's, not the default
    printed("generate", other_target, "--head", head, "the cat", "--max-tokens", 4)


def test_loss_that_is_not_finite_is_a_failure(training: Words, tmp_path: Path) -> None:
    command = (*training, "--output", tmp_path, *SMALL, "--lr", "1e30", "--steps", 5)
    [_, line] = invoke(*command, code=1).stderr.splitlines()
    assert line.startswith("peagle: loss is nan at step ")


def test_sigint_leaves_a_resumable_checkpoint(training: Words, tmp_path: Path) -> None:
    command = (*training, "--output", tmp_path, *SMALL)
    threading.Thread(target=_interrupt_after, args=(tmp_path / "metrics.jsonl",)).start()
    said = invoke(*command, "--steps", 100000, code=130).stderr
    done = len(metrics(tmp_path))
    assert f"stopped at step {done}: continue with --resume" in said
    invoke(*command, "--steps", done + 2, "--resume")
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, done + 3))


def _interrupt_after(file: Path) -> None:
    """SIGINT to this process once training has taken a step."""
    deadline = time.monotonic() + 60
    while not file.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    if file.is_file():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_correction_is_trained_measured_and_used(
    target: Path, training: Words, heads: dict[str, Path], tmp_path: Path
) -> None:
    start = (*training, "--init-from", heads["p-eagle"], "--steps", 20)
    output = tmp_path / "frozen"
    invoke(*start, "--correction", "frozen", "--output", output, "--correction-lr", "1e-2")
    made = output / "head"
    for file in ("model.safetensors", "config.json"):
        same = (made / file).read_bytes() == (heads["p-eagle"] / file).read_bytes()
        assert same == (file == "model.safetensors"), "only what is recorded changes"
    assert (made / "correction" / "model.safetensors").is_file()
    checks = printed("doctor", made, target)["checks"]
    found = {check["name"]: check["found"] for check in checks if check["state"] == "ok"}
    assert found["correction"] == "rank 128, 32 candidates, of this head"
    assert "argmaxes agree" in found["logits"]
    prompt = ("generate", target, "the cat", "--max-tokens", 20)
    alone = printed(*prompt, "--method", "none")
    drafted = printed(*prompt, "--head", made, "--nodes", 8)
    assert drafted["text"] == alone["text"]
    exported = tmp_path / "vllm"
    invoke("export", made, exported, "--to", "vllm", "--target", target)
    assert (exported / "correction" / "config.json").is_file()

    again = tmp_path / "joint"
    start = (*training, "--init-from", made, "--steps", 5)
    invoke(*start, "--correction", "joint", "--output", again)
    first, second = (head / "model.safetensors" for head in (made, again / "head"))
    assert first.read_bytes() != second.read_bytes()
    assert (again / "head" / "correction").is_dir()


def test_a_correction_of_a_head_that_records_no_depths(
    training: Words, heads: dict[str, Path], tmp_path: Path
) -> None:
    """As published ones."""
    public = shutil.copytree(heads["p-eagle"], tmp_path / "public")
    native = read_json(public / "config.json")["peagle"]
    change_json(public / "config.json", peagle=native | {"depths": None})
    start = (*training, "--init-from", public, "--correction", "frozen", "--depths", 3)
    invoke(*start, "--output", tmp_path / "out", "--steps", 1)
    assert read_json(tmp_path / "out" / "head" / "config.json")["peagle"]["depths"] == 3


def test_a_run_is_not_continued_without_the_head_that_it_began_with(
    training: Words, heads: dict[str, Path], tmp_path: Path, refused
) -> None:
    """The options may describe it, and do where it was made by the same ones."""
    command = (*training, "--output", tmp_path, *SMALL, "--feature-layers", "2,3,4")
    start = ("--init-from", heads["p-eagle"])
    invoke(*command, *start, "--steps", 1)
    line = refused(*command, "--steps", 2, "--resume", field="init_from")
    assert "--init-from False: was True when the run began" in line
    other = shutil.copytree(heads["p-eagle"], tmp_path / "other")
    native = read_json(other / "config.json")["peagle"]
    less = native["provenance"] | {"data": {"answer_tokens": 24, "steps": 1}}
    change_json(other / "config.json", peagle=native | {"provenance": less})
    refused(*command, "--init-from", other, "--steps", 2, "--resume", field="init_from[data]")
    invoke(*command, *start, "--steps", 2, "--resume")
    data = read_json(tmp_path / "head" / "config.json")["peagle"]["provenance"]["data"]
    assert data["steps"] == 62


def test_a_seed_decides_the_weights_of_a_correction(
    training: Words, heads: dict[str, Path], tmp_path: Path
) -> None:
    """Also on a head that is there already."""
    start = (*training, "--init-from", heads["p-eagle"], "--steps", 1)
    made = list[bytes]()
    for run, seed in enumerate((1, 1, 2)):
        output = tmp_path / str(run)
        invoke(*start, "--correction", "frozen", "--output", output, "--seed", seed)
        made.append((output / "head" / "correction" / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_the_recipe_of_the_paper_leaves_a_head_as_it_is(
    training: Words, heads: dict[str, Path], tmp_path: Path
) -> None:
    start = (*training, "--init-from", heads["p-eagle"], "--recipe", "paper", "--steps", 1)
    invoke(*start, "--output", tmp_path)
    config = read_json(tmp_path / "head" / "config.json")
    assert (config["peagle"]["embedding"], config["draft_vocab_size"]) == ("mask-row", 112)


def test_a_new_head_is_trained_with_its_correction(training: Words, tmp_path: Path) -> None:
    start = (*training, "--layers", 1, "--depths", 3, "--steps", 4)
    invoke(*start, "--correction", "joint", "--output", tmp_path)
    assert (tmp_path / "head" / "correction").is_dir()
    record = read_json(tmp_path / "head" / "config.json")["peagle"]["provenance"]
    assert record["data"]["steps"] == 4 and record["data"]["answer_tokens"] > 0


def test_correction_needs(training: Words, heads: dict[str, Path], tmp_path: Path, refused) -> None:
    command = (*training, "--output", tmp_path, "--correction")
    refused(*command, "frozen", field="correction")
    refused(*command, "thawed", field="correction")
    head = ("--init-from", heads["eagle3"], "--method", "eagle3")
    refused(*command, "frozen", *head, field="correction")
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_the_data_that_it_wrote(
    target: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps would ask for more records, of which others would be held out."""
    lines = answers.read_text().splitlines(keepends=True)

    def synthesize(llm: object, output: Path, wanted: SynthConfig, count: object) -> None:
        output.parent.mkdir(exist_ok=True)
        output.write_text("".join(lines[: wanted.count]))

    monkeypatch.setattr(train, "synthesize", synthesize)
    output = tmp_path / "own"
    command = ("train", target, "--data", "synth", "--output", output, *SMALL, "--steps")
    invoke(*command, 21)
    [file] = output.glob("synth-*.jsonl")
    before = file.read_text()
    assert len(before.splitlines()) == 21
    invoke(*command, 22, "--resume")
    assert file.read_text() == before
    assert [line["step"] for line in metrics(output)] == list(range(1, 23))


def test_what_another_target_wrote_is_not_trained_on(
    target: Path, other_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped before its first checkpoint leaves its text."""
    monkeypatch.setattr(train, "synthesize", lambda *_: None)
    targets = [load_target(str(each)) for each in (target, other_target, target)]
    config = TrainConfig(output=tmp_path)
    first, other, again = (train._synthesize(each, config) for each in targets)
    assert first == again != other


def test_unusable_records(target: Path, answers: Path, tmp_path: Path, refused: Any) -> None:
    """A few are left out and told, by every command that reads such a file; none with --strict."""
    good = answers.read_text().splitlines()
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join([*good * 2, '{"messages": [{"role": "critic", "content": "x"}]}']))
    train_it = ("train", target, "--data", file, "--steps", 1, *SMALL)
    capture_it = ("data", "capture", target, "--data", file, "--feature-layers", "1,2,3")
    regenerate = ("data", "regenerate", target, "--prompts", file, "--max-tokens", 2)
    for command in (train_it, capture_it):
        told = invoke(*command, "--output", tmp_path / command[1]).stderr
        assert "1 × record" in told and "'critic'" in told
        line = refused(*command, "--output", tmp_path / "strict", "--strict")
        assert f"record {2 * len(good) + 1}: messages[0] 'critic': has an unknown role" in line
    line = refused(*regenerate, "--output", tmp_path / "made.jsonl")
    assert f"{file}: " in line

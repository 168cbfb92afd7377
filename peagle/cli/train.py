"""`peagle train`: a head for a target."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from peagle.cli import train_options as options
from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    TargetArgument,
    existing_file,
    parse_list,
    progress_bar,
    screen,
)
from peagle.errors import InputError, first_line

if TYPE_CHECKING:
    from peagle.data.captured import Captured
    from peagle.data.example import Example
    from peagle.methods.spec import HeadSpec
    from peagle.model.drafter import Drafter
    from peagle.model.target import Target
    from peagle.train.trainer import TrainConfig, Trainer

app = typer.Typer(add_completion=False)
# What --config may name, and its type.
SETTINGS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("data", "output", "method", "init_from", "feature_layers", "embedding"), str),
    **dict.fromkeys(("layers", "depths", "draft_vocab", "max_length", "batch", "pack"), int),
    **dict.fromkeys(("segments", "steps", "epochs", "max_train_tokens", "seed"), int),
    **dict.fromkeys(("save_every", "keep", "eval_every", "patience"), int),
    **dict.fromkeys(("lr", "ratio", "floor"), float),
    **dict.fromkeys(("loss", "tracker", "chat_template"), str),
    **dict.fromkeys(
        ("recompute", "shard"), lambda text: {"true": True, "false": False}[text.lower()]
    ),
}
HEAD = ("method", "layers", "depths", "draft_vocab", "feature_layers", "embedding")
SYNTH_TOKENS, SYNTH_LEAST = 256, 20  # of a written answer, at most; records, at least
NOT_YAML = (yaml.YAMLError, UnicodeDecodeError, RecursionError)
EVAL_PROMPTS = 8  # documents whose prompts are kept from training, to measure acceptance on


@app.command()
def train(
    target: TargetArgument,
    data: options.DataOption = None,
    output: options.OutputOption = None,
    method: options.MethodOption = None,
    layers: options.LayersOption = None,
    depths: options.DepthsOption = None,
    draft_vocab: options.DraftVocabOption = None,
    feature_layers: options.FeatureLayersOption = None,
    embedding: options.EmbeddingOption = None,
    max_length: options.MaxLengthOption = None,
    chat_template: ChatTemplateOption = None,
    batch: options.BatchOption = None,
    pack: options.PackOption = None,
    segments: options.SegmentsOption = None,
    recompute: options.RecomputeOption = None,
    shard: options.ShardOption = None,
    steps: options.StepsOption = None,
    epochs: options.EpochsOption = None,
    max_train_tokens: options.MaxTrainTokensOption = None,
    lr: options.LearningRateOption = None,
    loss: options.LossOption = None,
    seed: options.SeedOption = None,
    eval_every: options.EvalEveryOption = None,
    patience: options.PatienceOption = None,
    tracker: options.TrackerOption = None,
    init_from: options.InitFromOption = None,
    resume: options.ResumeOption = False,
    config: options.ConfigOption = None,
    device: DeviceOption = "auto",
    overrides: options.OverridesArgument = None,
) -> None:
    """Train a draft head. Ctrl-C leaves a checkpoint that --resume continues exactly."""
    named = locals()
    given = {n: named[n] for n in SETTINGS if named.get(n) is not None}
    settings = {**_from_yaml(config), **_from_overrides(overrides or []), **given}
    if settings.get("segments") == "auto":
        del settings["segments"]
    settings = {n: _typed(n, value) for n, value in settings.items() if value is not None}
    for name, what in (("data", "a JSONL file of answers"), ("output", "a folder to write")):
        if name not in settings:
            raise InputError(f"--{name} is missing: name {what}")
    _run(target, settings, resume, device)


def _run(target_name: str, settings: dict[str, Any], resume: bool, device: str) -> None:
    import torch
    from transformers.utils import logging

    from peagle.data.captured import Captured
    from peagle.methods.load import load_drafter
    from peagle.model.loader import load_target, resolve_device
    from peagle.model.template import use_template
    from peagle.train.evaluate import hold_out, measure_on
    from peagle.train.state import checkpoints
    from peagle.train.trainer import TrainConfig, Trainer
    from peagle.train.warm_start import new_drafter

    data, init_from = settings.pop("data"), settings.pop("init_from", None)
    chat_template = settings.pop("chat_template", None)
    captured = Captured(Path(data)) if Path(data).is_dir() else None
    if captured is None and data != "synth":
        existing_file(Path(data), "--data")
    max_length = _max_length(settings.pop("max_length", None), captured)
    spec = _head_spec(settings, captured)
    config = TrainConfig(**settings | {"output": Path(settings["output"])})
    if checkpoints(config.output) and not resume:
        raise InputError(f"{config.output} holds a checkpoint: add --resume, or name a new folder")
    logging.disable_progress_bar()
    rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    screen.quiet = rank > 0  # of several processes (torchrun) the first one speaks
    if data == "synth" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "--data synth: for several processes make it first, with peagle data synth"
        )
    device = resolve_device(device)
    device = resolve_device(f"cuda:{local}") if device == "cuda" else device
    target = load_target(target_name, device="cpu" if config.shard else device)
    assert target.tokenizer is not None
    use_template(target.tokenizer, chat_template)
    examples = _documents(captured or data, target, config, max_length)
    if init_from:
        drafter = _adopt(load_drafter(init_from, target, force=True), target, spec)
    else:
        answers = ([i for i, said in zip(*e, strict=True) if said] for e in examples)
        torch.manual_seed(config.seed)
        drafter = new_drafter(target, answers, spec)
    kept = hold_out(examples, EVAL_PROMPTS)
    if not kept.prompts:
        screen.print("too few documents to keep some from training: acceptance is not measured")
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {config.output}: no folder can be there ({error})") from error
    where = torch.device(device)
    measure = measure_on(target, kept.prompts)
    trainer = Trainer(config, target, drafter, kept.train, measure, captured, where)
    _train(trainer, resume)


def _head_spec(settings: dict[str, Any], captured: "Captured | None") -> "HeadSpec":
    """What head to make; its settings are taken out of `settings`."""
    from peagle.methods.spec import HeadSpec

    head = {name: settings.pop(name) for name in HEAD if name in settings}
    if head.get("method") == "eagle3":
        head.setdefault("layers", 1)
    if taps := head.pop("feature_layers", None):
        head["feature_layers"] = tuple(parse_list(taps, "--feature-layers"))
    elif captured is not None:
        head["feature_layers"] = captured.origin.feature_layers
    return HeadSpec(**head)


def _max_length(given: int | None, captured: "Captured | None") -> int:
    """Longest document, in tokens."""
    if captured is not None and given not in (None, captured.origin.max_length):
        cut = captured.origin.max_length
        raise InputError(f"max_length {given}: the captured documents were cut to {cut}")
    if given is not None and given < 4:
        raise InputError(f"max_length {given}: must be at least 4 tokens")
    return 1024 if given is None else given


def _documents(
    data: "Captured | str", target: "Target", config: "TrainConfig", max_length: int
) -> "list[Example]":
    """What is trained on: captured, made by the target here, or read from a file."""
    from peagle.data.dataset import read_examples

    if not isinstance(data, str):
        data.check_target(target)
        return data.examples()
    file = _synthesize(target, config) if data == "synth" else Path(data)
    assert target.tokenizer is not None
    return read_examples(file, target.tokenizer, max_length)


def _synthesize(target: "Target", config: "TrainConfig") -> Path:
    """Data for this run that the target writes itself, into the run's folder."""
    from peagle.data.synth import SynthConfig, synthesize
    from peagle.engine.llm import LLM

    records = 1000
    if config.steps is not None:
        records = config.steps * config.batch
    elif config.max_train_tokens is not None:
        records = -(-config.max_train_tokens // SYNTH_TOKENS)
    file = config.output / "data.jsonl"
    wanted = SynthConfig(count=max(records, SYNTH_LEAST), max_tokens=SYNTH_TOKENS)
    with progress_bar("writing data") as bar:
        task = bar.add_task("", total=records)
        synthesize(
            LLM(target),
            file,
            wanted,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    return file


def _train(trainer: "Trainer", resume: bool) -> None:
    """Run, showing progress and what was measured on the way."""
    from peagle.train.resume import resume as continue_run

    if resume:
        continue_run(trainer)
    output = trainer.config.output
    with progress_bar("training") as bar:
        task = bar.add_task("", total=trainer.total_steps, completed=trainer.progress.step)

        def show(metrics: dict[str, Any]) -> None:
            bar.update(task, completed=metrics["step"])
            if "acceptance_length" in metrics:
                shares = " ".join(f"{share:.3f}" for share in metrics["accepted_per_position"])
                length = metrics["acceptance_length"]
                screen.print(f"step {metrics['step']}: acceptance length {length} ({shares})")

        try:
            trainer.run(show)
        except FloatingPointError as error:
            screen.print(f"peagle: {error}")
            raise typer.Exit(1) from error
        except OSError as error:
            why = "what was saved before is whole: make room, then --resume"
            screen.print(f"peagle: {output}: cannot be written ({error}); {why}")
            raise typer.Exit(1) from error
    if not trainer.finished:
        screen.print(f"stopped at step {trainer.progress.step}: continue with --resume")
        raise typer.Exit(1)
    screen.print(f"head: {output / 'head'} ({trainer.progress.answer_tokens} answer tokens)")


def _adopt(drafter: "Drafter", target: "Target", spec: "HeadSpec") -> "Drafter":
    """A head to start from, in float32, as one that is trained for this target."""
    from peagle.methods.save import with_provenance

    method = drafter.config.method
    if method != spec.method:
        raise InputError(f"--method {spec.method}: the head of --init-from is {method}, name that")
    drafter.config = replace(drafter.config, depths=spec.depths)
    with_provenance(
        drafter,
        target=target.name,
        config_hash=target.config_hash(),
        weights_hash=target.weights_hash(),
        template_hash=target.template_hash(),
        feature_layers=list(drafter.config.feature_layers),
        data={},
        acceptance={},
    )
    return drafter.float()


def _from_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(existing_file(path, "--config").read_text())
    except NOT_YAML as error:
        raise InputError(f"--config {path}: not YAML ({first_line(error)})") from error
    if not isinstance(loaded, dict):
        raise InputError(f"--config {path}: expected name: value lines")
    return loaded


def _typed(name: str, value: object) -> Any:
    """A setting from YAML, where 6e-4 is a text and a list of layers is a list."""
    if name not in SETTINGS:
        raise InputError(f"setting {name!r}: known are {', '.join(SETTINGS)}")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        return SETTINGS[name](text)
    except (ValueError, KeyError) as error:
        kinds: dict[Any, str] = {int: "a whole number", float: "a number"}
        kind = kinds.get(SETTINGS[name], "true or false")
        raise InputError(f"setting {name} {text!r}: expected {kind}") from error


def _from_overrides(overrides: list[str]) -> dict[str, Any]:
    pairs = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{text!r}: overrides are name=value")
        try:
            pairs[name] = yaml.safe_load(value)
        except NOT_YAML as error:
            raise InputError(f"setting {name} {value!r:.40}: {first_line(error)}") from error
    return pairs

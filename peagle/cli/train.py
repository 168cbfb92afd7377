"""`peagle train`: a head for a target."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from peagle.cli.common import (
    DeviceOption,
    TargetArgument,
    existing_file,
    parse_list,
    progress_bar,
    screen,
)
from peagle.config import InputError

if TYPE_CHECKING:
    from peagle.model.drafter import Drafter
    from peagle.model.target import Target
    from peagle.train.trainer import TrainConfig

app = typer.Typer()
# What --config may name, and its type.
SETTINGS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("data", "output", "method", "init_from", "feature_layers"), str),
    **dict.fromkeys(("layers", "depths", "draft_vocab", "max_length", "steps", "epochs"), int),
    **dict.fromkeys(("max_train_tokens", "seed"), int),
    "lr": float,
}


@app.command()
def train(
    target: TargetArgument,
    data: Annotated[
        Path | None, typer.Option(help="JSONL of answers or conversations, plain or .gz.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for checkpoint/, head/, metrics.jsonl.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="p-eagle (default) or eagle3.")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Drafter layers. Default: 4, eagle3 1.")
    ] = None,
    depths: Annotated[int | None, typer.Option(help="Draft tokens trained for. Default 8.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Most frequent tokens drafted. Default 8192.")
    ] = None,
    feature_layers: Annotated[
        str | None, typer.Option(help="Tapped target layers: 2,15,27.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Longest document, in tokens. Default 1024.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, one document each.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data. Default 1.")] = None,
    max_train_tokens: Annotated[int | None, typer.Option(help="Answer tokens to train on.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. Default 6e-4.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order and sampling.")] = None,
    init_from: Annotated[str | None, typer.Option(help="Start from this head.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from output/checkpoint.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML with the same names.")] = None,
    device: DeviceOption = "cpu",
    overrides: Annotated[
        list[str] | None, typer.Argument(help="name=value, over --config.")
    ] = None,
) -> None:
    """Train a drafter. Ctrl-C leaves a checkpoint that --resume continues exactly."""
    options = locals()
    given = {name: options[name] for name in SETTINGS if options[name] is not None}
    settings = {**_from_yaml(config), **_from_overrides(overrides or []), **given}
    settings = {n: _typed(n, value) for n, value in settings.items() if value is not None}
    for name, what in (("data", "a JSONL file of answers"), ("output", "a folder to write")):
        if name not in settings:
            raise InputError(f"--{name} is missing: name {what}")
    _run(target, settings, resume, device)


def _run(target_name: str, settings: dict[str, Any], resume: bool, device: str) -> None:
    from transformers.utils import logging

    from peagle.data.dataset import read_examples
    from peagle.model.drafter import Drafter
    from peagle.model.source import load_target
    from peagle.train.start import new_drafter
    from peagle.train.trainer import TrainConfig, Trainer

    data = existing_file(Path(settings.pop("data")), "--data")
    init_from, taps = settings.pop("init_from", None), settings.pop("feature_layers", None)
    settings["output"] = Path(settings["output"])
    if settings.setdefault("method", "p-eagle") not in ("p-eagle", "eagle3"):
        raise InputError(f"--method {settings['method']!r}: choose p-eagle or eagle3")
    if settings["method"] == "eagle3":
        settings.setdefault("layers", 1)
    train_config = TrainConfig(**settings)
    if (train_config.output / "checkpoint").is_dir() and not resume:
        raise InputError(
            f"{train_config.output} holds a checkpoint: add --resume, or name a new folder"
        )
    logging.disable_progress_bar()
    target = load_target(target_name, device=device)
    assert target.tokenizer is not None
    examples = read_examples(data, target.tokenizer, train_config.max_length)
    if init_from:
        drafter = _adopt(Drafter.load(init_from, target, force=True), target, train_config)
    else:
        drafter = new_drafter(
            target,
            ([i for i, said in zip(e.ids, e.supervised, strict=True) if said] for e in examples),
            method=train_config.method,
            layers=train_config.layers,
            depths=train_config.depths,
            draft_vocab=train_config.draft_vocab,
            feature_layers=tuple(parse_list(taps, "--feature-layers")) if taps else None,
        )
    train_config.output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(train_config, target, drafter, examples)
    if resume:
        trainer.resume()
    with progress_bar("training") as bar:
        task = bar.add_task("", total=trainer.total_steps, completed=trainer.progress.step)
        try:
            trainer.run(lambda metrics: bar.update(task, completed=metrics["step"]))
        except FloatingPointError as error:
            screen.print(f"peagle: {error}")
            raise typer.Exit(1) from error
    if not trainer.finished:
        screen.print(f"stopped at step {trainer.progress.step}: continue with --resume")
        raise typer.Exit(1)
    screen.print(
        f"head: {train_config.output / 'head'} ({trainer.progress.answer_tokens} answer tokens)"
    )


def _adopt(drafter: "Drafter", target: "Target", config: "TrainConfig") -> "Drafter":
    """A head to start from, in float32, as one that is trained for this target."""
    from peagle.model.checkpoint import with_provenance

    method = drafter.config.method
    if method != config.method:
        raise InputError(
            f"--method {config.method}: the head of --init-from is {method}, name that"
        )
    drafter.config = replace(drafter.config, depths=config.depths)
    with_provenance(
        drafter,
        target=target.name,
        config_hash=target.config_hash(),
        weights_hash=target.weights_hash(),
        template_hash=target.template_hash(),
        data={},
        acceptance={},
    )
    return drafter.float()


def _from_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(existing_file(path, "--config").read_text())
    except yaml.YAMLError as error:
        raise InputError(f"--config {path}: not YAML ({str(error).splitlines()[0]})") from error
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
    except ValueError as error:
        kind = "a whole number" if SETTINGS[name] is int else "a number"
        raise InputError(f"setting {name} {text!r}: expected {kind}") from error


def _from_overrides(overrides: list[str]) -> dict[str, Any]:
    pairs = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{text!r}: overrides are name=value")
        pairs[name] = yaml.safe_load(value)
    return pairs

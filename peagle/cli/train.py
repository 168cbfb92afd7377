"""`peagle train`: a head for a target."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from peagle.cli import common
from peagle.cli.options import INTERRUPTED, refuse_idle
from peagle.cli.settings import ConfigOption, RecipeOption
from peagle.data.captured import Captures, target_hashes
from peagle.data.dataset import read_examples
from peagle.data.documents import Documents
from peagle.data.example import fingerprint
from peagle.data.synth import SynthConfig, synthesize
from peagle.engine.llm import LLM
from peagle.errors import InputError, check_at_least
from peagle.files import writing
from peagle.heads.load import load_drafter
from peagle.locks import held
from peagle.methods.registry import METHODS
from peagle.model.config import Provenance
from peagle.model.drafter import Drafter
from peagle.model.loader import resolve_device
from peagle.model.target import Target
from peagle.paths import digest
from peagle.tools.card import write_card
from peagle.train import resume
from peagle.train.config import TrainConfig
from peagle.train.spec import DEPTHS, HeadSpec
from peagle.train.state import checkpoints
from peagle.train.trainer import States, Trainer
from peagle.train.walk import Walk, acceptance, hold_out
from peagle.train.warm_start import SAMPLE, new_drafter, with_correction, with_norms

SYNTH_TOKENS = 256  # maximum tokens of an answer that the target writes for itself
MAX_LENGTH = 1024  # default maximum tokens of a document
PAPER_LENGTH = 8192  # with --recipe paper
KEPT = "what was saved before is whole: --resume goes on from there"
UNMEASURED = "too few documents have their own prompt: acceptance is not measured; use --held-out"


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run.

    Data:
    data: Training data: a JSONL file (plain or .gz), a captured folder, or synth, which has the
        target write it; repeat the option for several files or folders. Required here or in
        --config.
    max_length: Maximum length of a document in tokens, at most the target's context; the rest is
        cut. Default: 1024.
    held_out: JSONL file of the target's answers to measure the acceptance length on. Default: 64
        documents of the training data, at most a tenth, which are then not trained on.

    Head:
    init_from: Head to start from, a folder or hub id. Default: a new head made from the target's
        layers.
    correction: Train a correction of the drafts by the token before: frozen leaves the head of
        --init-from as it is, joint trains the head, too. Default: none.

    Run:
    resume: Continue exactly from the last checkpoint in --output; with auto, begin where there is
        none.
    """

    data: tuple[str, ...] = ()
    max_length: int | None = None
    held_out: Path | None = None
    strict: bool = False
    init_from: str | None = None
    correction: Literal["frozen", "joint"] | None = None
    resume: Literal["never", "always", "auto"] = "never"

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("is missing", field="data", fix="name a JSONL file of answers")
        if self.held_out is not None:
            common.existing_file(self.held_out, "held_out")
        if self.correction == "frozen" and self.init_from is None:
            fix = "name it with `init_from`"
            raise InputError("needs a head", field="correction", value="frozen", fix=fix)


def train(
    context: typer.Context,
    target: str,
    *,
    start: Start,
    training: TrainConfig,
    head: HeadSpec,
    chat_template: Annotated[str | None, typer.Option(rich_help_panel="Model")] = None,
    recipe: RecipeOption = None,
    config: ConfigOption = None,  # the other options' defaults by now
    device: Annotated[str, typer.Option(rich_help_panel="Machine")] = "auto",
) -> None:
    """Train a draft head. Ctrl-C leaves a checkpoint that --resume continues exactly.

    Recipe:
    recipe: Settings to begin with: paper, those of the P-EAGLE paper; --config and options take
        precedence. Default: each option's own.
    config: YAML file with settings of the same names; options take precedence.
    """
    data = [Path(os.path.expanduser(source)) for source in start.data]
    captured = Captures(data) if any(source.is_dir() for source in data) else None
    synthetic = start.data == ("synth",)
    if captured is None and not synthetic:
        for source in data:
            common.existing_file(source, "data")
    max_length = _max_length(start.max_length, captured, recipe)
    _check_start(context, start, head, training.output)
    common.check_folder(training.output)
    if synthetic and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fix = "make it first, with peagle data synth"
        raise InputError("is for one process", field="data", value="synth", fix=fix)
    # Of several processes the first one speaks.
    common.screen.quiet = int(os.environ.get("RANK", "0")) > 0
    device = resolve_device(device)
    if device == "cuda":  # one for each process, where torchrun started several
        device = resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    unrun = None
    if captured is not None and start.held_out is None:
        unrun = head.layers or METHODS[head.method].layers
    place = "cpu" if training.shard else device
    model = common.open_target(target, chat_template, device=place, unrun=unrun)
    if start.init_from is None:
        head = _tapped(head, model, captured, recipe)
    if captured is None:
        files = [_synthesize(model, training)] if synthetic else data
        examples = _read(files, model, max_length, start.strict)
    else:
        captured.check(model, head.feature_layers)
        captured.verify()
        examples = captured
    examples, measured = _split(start, examples, model)
    drafter = _drafter(start, model, head, examples, training.seed)
    if captured is not None:
        captured.check(model, drafter.config.feature_layers)
    if drafter.correction is None:
        refuse_idle(context, ["correction_lr"], "with this head")
    walk = Walk(model, measured, _states(measured))
    measure = partial(acceptance, walk) if walk.documents else None
    if measure is None:
        common.screen.print(UNMEASURED)
    states = _states(examples)
    trainer = Trainer(training, model, drafter, examples, measure, states, torch.device(device))
    trainer.progress.settings["held_out"] = fingerprint(measured)[:16]
    training.output.mkdir(parents=True, exist_ok=True)
    with held(training.output) if trainer.accelerator.is_main_process else nullcontext():
        go_on = resume.resume if checkpoints(training.output) else resume.start_from_here
        go_on(trainer)
        _train(trainer, len(walk.documents))


def _check_start(context: typer.Context, start: Start, head: HeadSpec, output: Path) -> None:
    """Raises InputError, before the work begins, for an option that does nothing, for a checkpoint
    that is not asked for, and where the one that is asked for is not there."""
    if METHODS[head.method].parallel:
        refuse_idle(context, ["norm_output"], "with this head")
    if start.resume == "never" and checkpoints(output):
        fix = "add `resume`, or name a new folder"
        raise InputError("holds a checkpoint", field="output", value=output, fix=fix)
    if start.resume == "always" and not checkpoints(output):
        resume.newest_checkpoint(output)  # raises InputError


def _split(
    start: Start, examples: Documents[Any], target: Target
) -> tuple[Documents[Any], Documents[Any]]:
    """Documents to train on, and to measure on: held out, unless a file of them is named."""
    if start.held_out is not None:
        return examples, _read([start.held_out], target, target.max_context, start.strict)
    train, measured = hold_out(examples)
    return examples.only(train), examples.only(measured)


def _states(documents: Documents[Any]) -> States | None:
    """The target's output for documents, where it was captured."""
    return documents.output if isinstance(documents, Captures) else None


def _tapped(
    spec: HeadSpec, target: Target, captured: Captures | None, recipe: str | None
) -> HeadSpec:
    """A new head with the layers it reads, where they are not its default ones, and with the
    embedding of the recipe."""
    if spec.feature_layers is None and captured is not None:
        spec = replace(spec, feature_layers=captured.parts[0].origin.feature_layers)
    if recipe != "paper":
        return spec
    count = target.num_layers
    layers = spec.feature_layers or (2, count // 2, count - 1)
    return replace(spec, feature_layers=layers, embedding=spec.embedding or "full")


def _max_length(chosen: int | None, captured: Captures | None, recipe: str | None) -> int:
    """Maximum tokens of a document."""
    for part in captured.parts if captured else ():
        if chosen not in (None, part.origin.max_length):
            why = f"the captured documents were cut to {part.origin.max_length}"
            raise InputError(why, field="max_length", value=chosen)
    check_at_least(4, max_length=chosen)
    default = PAPER_LENGTH if recipe == "paper" else MAX_LENGTH
    return default if chosen is None else chosen


def _read(files: Sequence[Path], target: Target, max_length: int, strict: bool) -> Documents[Any]:
    """Training documents of data files."""
    assert target.tokenizer is not None
    longest = min(max_length, target.max_context)
    read = (read_examples(file, target.tokenizer, longest, strict=strict) for file in files)
    return Documents([part for documents in read for part in documents.parts])


def _synthesize(target: Target, config: TrainConfig) -> Path:
    """Data for this run that the target writes itself, into the run's folder, in a file of its own:
    another target's tokens are other words. A run that goes on keeps what it began with: further
    records would change which documents are held out."""
    file = config.output / f"synth-{digest(repr(target_hashes(target)).encode())}.jsonl"
    known = list(config.output.glob("synth-*.jsonl"))
    if known and checkpoints(config.output):
        return file if file in known else known[0]  # another target's, which resuming refuses
    records = 1000
    if config.steps is not None:
        records = config.steps * config.batch
    elif config.max_train_tokens is not None:
        records = -(-config.max_train_tokens // SYNTH_TOKENS)
    wanted = SynthConfig(count=max(records, 20), max_tokens=SYNTH_TOKENS)
    with common.counting("records", records, common.WRITTEN) as count:
        synthesize(LLM(target), file, wanted, count)
    return file


def _drafter(
    start: Start, target: Target, spec: HeadSpec, examples: Documents[Any], seed: int
) -> Drafter:
    """The head to train: a new one, or a saved one as one that is trained for this target; with a
    correction where that is trained."""
    torch.manual_seed(seed)
    if start.correction == "frozen" and start.init_from is not None:
        head = _loaded(start.init_from, target, spec, frozen=True)
        head.config = replace(head.config, depths=head.config.depths or spec.depths or DEPTHS)
        return with_correction(head, frozen=True)
    answers = ([i for i, written in zip(*e, strict=True) if written] for e in examples)
    features = None
    if states := _states(examples):
        sample = range(min(SAMPLE, len(examples)))
        longest = max(sample, key=lambda number: len(examples[number].ids))
        features = partial(states, [longest], target)
    if start.init_from:
        drafter = _loaded(start.init_from, target, spec, frozen=False)
        _adopt(drafter, target, spec)
        drafter = with_norms(drafter, target, answers, spec, features)
    else:
        drafter = new_drafter(target, answers, spec, features)
    return with_correction(drafter, frozen=False) if start.correction else drafter


def _train(trainer: Trainer, measured: int) -> None:
    """Run, showing progress and what was found on the documents to measure on."""
    output = trainer.config.output
    tokens = f"{sum(trainer.batches.lengths)} tokens, {trainer.batches.answer_tokens} of answers"
    data = f"{len(trainer.data)} documents ({tokens})"
    steps = f"steps {trainer.progress.step + 1} to {trainer.total_steps}"
    common.screen.print(f"training on {data}, measured on {measured} held out: {steps}")
    with common.progress_bar("steps") as bar:
        task = bar.add_task("", total=trainer.total_steps, completed=trainer.progress.step)

        def show(metrics: dict[str, Any]) -> None:
            bar.update(task, completed=metrics["step"], description=f"loss {metrics['loss']}")
            if "acceptance_length" in metrics:
                shares = " ".join(f"{share:.3f}" for share in metrics["accepted_per_position"])
                length = f"acceptance length {metrics['acceptance_length']:.2f}"
                found = f"{length} over {measured} documents ({shares})"
                common.screen.print(f"step {metrics['step']}: {found}")

        with writing(output, kept=KEPT), common.failing(FloatingPointError):
            trainer.run(show)
    if trainer.accelerator.is_main_process:
        for folder in (output / "head", output / "best"):
            if folder.is_dir():
                write_card(folder)
    if not trainer.finished:
        common.screen.print(f"stopped at step {trainer.progress.step}: continue with --resume")
        raise typer.Exit(INTERRUPTED)
    common.screen.print(f"head: {output / 'head'} ({trainer.progress.answer_tokens} answer tokens)")


def _loaded(name: str, target: Target, spec: HeadSpec, *, frozen: bool) -> Drafter:
    """A head to start from, in float32; a frozen one is of this target. Raises InputError where
    another one is described."""
    head = load_drafter(name, target, force=not frozen).float()
    config = head.config
    own = {each: getattr(config, each) for each in ("method", "feature_layers", "embedding")}
    own |= {"layers": len(head.layers), "draft_vocab": config.draft_vocab_size, "warm_start": True}
    if frozen:
        own |= {"depths": config.depths or spec.depths, "fc_norm": config.fc_norm}
    for field, value in own.items():
        if getattr(spec, field) not in (None, value):
            why = f"with `init_from` it is {value}"
            raise InputError(why, field=field, value=getattr(spec, field), fix="name that")
    return head


def _adopt(drafter: Drafter, target: Target, spec: HeadSpec) -> None:
    """Describe a head to start from as one that is trained for this target."""
    config = drafter.config
    now = target_hashes(target)
    same = all(getattr(config.provenance, name) == value for name, value in now.items())
    data = config.provenance.data if same else {}  # tokens of another target do not count
    against = Provenance(target.name, **now, feature_layers=list(config.feature_layers), data=data)
    drafter.config = replace(config, depths=spec.depths or DEPTHS, provenance=against)

"""Shared by the commands: option types, the choice of the engine, loading, printing."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from peagle.catalog import METHODS, model_name
from peagle.cli.options import flag, with_flags
from peagle.errors import InputError, check_at_least
from peagle.files import writing
from peagle.vllm.process import Engine, default_engine

if TYPE_CHECKING:  # what runs models is imported by what runs: --help does not wait for torch
    from peagle.engine.llm import LLM
    from peagle.model.target import Target

screen = Console(stderr=True, highlight=False, soft_wrap=True)
console = Console(highlight=False, soft_wrap=True)

PIPED_WIDTH = 140  # characters
WRITTEN = "written, run it again to go on"  # records of a data file, after Ctrl-C
LOG_SECONDS = 30.0  # between lines about progress, where stderr is no terminal

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
VllmPythonOption = Annotated[Path | None, typer.Option(envvar="PEAGLE_VLLM_PYTHON")]
LEAVE_OUT = "leave it out, or set `engine` to native"
# Options of the native engine only: why vLLM has none, and what to do with vLLM. Of two of them
# vLLM has these values.
VLLMS = {"device": ("auto", "cuda"), "method": (*METHODS, "none")}
NOT_VLLMS = {
    "nodes": ("drafts chains only", "give `k`"),
    "method": ("drafts by heads only", LEAVE_OUT),
    "no_lookup": ("drafts by the head alone", LEAVE_OUT),
    "device": ("finds its devices itself", LEAVE_OUT),
    "quantize": ("has its own --quantization", "give that after -- of peagle serve"),
    "kv_tokens": ("sizes its cache in bytes", "give its --kv-cache-memory-bytes after --"),
    "allowed_hosts": ("answers to every name", LEAVE_OUT),
    "max_queue": ("has no limit of waiting requests", LEAVE_OUT),
    "max_seconds": ("has no limit of time", LEAVE_OUT),
}
# Options that would do nothing, or leave nothing that drafts, by the choice of the method.
EXCLUDED = {
    "`no_speculation`": ("head", "method", "k", "nodes"),
    "`method` none": ("k", "nodes"),
    "`method` lookup": ("head", "k", "no_lookup"),
}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of a target and its head.

    Drafting:
    head: Draft head: a folder or a hub id (owner/name@revision). Default: the catalog's head for
        the target.
    method: Drafting method: p-eagle, eagle3, lookup or none. Lookup drafts what followed when the
        newest tokens occurred before, without a head. Default: the method of the head, lookup
        where there is none.
    no_speculation: Decode with the target alone, the same as --method none.
    k: Number of draft tokens per round (num_speculative_tokens), one after another. Default: chosen
        every round.
    nodes: Number of draft tokens per round, as a tree. Default: chosen every round.
    no_lookup: Draft with the head alone, or nothing without one. Default: trees also hold what
        followed when the newest tokens occurred before.

    Model:
    dtype: Data type of the weights: auto (as in the checkpoint), float32, bfloat16 or float16.
    quantize: Weight quantization of the target's decoder layers: int8 or int4, on the CPU only.
        Default: none.
    """

    head: str | None = None
    method: str | None = None
    no_speculation: bool = False
    k: int | None = None
    nodes: int | None = None
    no_lookup: bool = False
    force: bool = False
    dtype: str = "auto"
    chat_template: str | None = None
    device: str = "auto"
    quantize: str | None = None

    @property
    def chosen_method(self) -> str | None:
        """The chosen method; None: the head's. Raises InputError for options that exclude it, and
        for K below 1."""
        check_at_least(1, k=self.k)
        way = "`no_speculation`" if self.no_speculation else f"`method` {self.method}"
        for name in EXCLUDED.get(way, ()):
            if getattr(self, name):
                raise InputError(f"excludes {way}", field=name, fix="leave one of them out")
        return "none" if self.no_speculation else self.method


def open_llm(
    target: str,
    options: ModelOptions,
    *,
    max_batch: int | None = None,  # None: LLM's default
    kv_tokens: int | None = None,
) -> "LLM":
    """Load the target and the head that the options name. The head's record is compared with the
    chat template that is used."""
    from transformers.utils import logging

    from peagle.engine.llm import LLM
    from peagle.heads.find import check_drafts, find_head
    from peagle.model.template import use_template

    method = options.chosen_method
    head = find_head(target, options.head, method)  # before the target takes its time to load
    check_drafts(target, head, options.k)
    device = announced_device(options.device)
    logging.disable_progress_bar()
    with screen.status(f"loading {model_name(target)}"):
        sizes: dict[str, Any] = {"max_batch": max_batch, "kv_tokens": kv_tokens}
        llm = LLM(target, dtype=options.dtype, device=device, quantize=options.quantize, **sizes)
        use_template(llm.tokenizer, options.chat_template)
        drafter = None if head is None else llm.load_head(head.folder, force=options.force)
    lookup = True if method == "lookup" else None
    if options.no_lookup or method == "none":
        lookup = False
    return llm.use(drafter, options.k, nodes=options.nodes, lookup=lookup)


def make_engine(llm: "LLM") -> None:
    """Make the engine, which measures for some seconds where no earlier run did. Raises InputError
    where its KV cache holds no request."""
    with screen.status("preparing the engine (a new machine is measured first)"):
        context = llm.context
    if context < 2:
        why = "has no room for a prompt and its answer"
        raise InputError(why, field="kv_tokens", value=llm.kv_tokens, fix="raise it")


def open_target(
    name: str,
    chat_template: str | None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    unrun: int | None = None,
) -> "Target":
    """Load a target without an engine, with the chat template that is used; of one that is not run
    only embedding, last norm, output head and the last `unrun` layers, see `load_partial`."""
    from transformers.utils import logging

    from peagle.model.loader import load_target
    from peagle.model.partial import load_partial
    from peagle.model.template import use_template

    logging.disable_progress_bar()
    if unrun is not None:
        target = load_partial(name, layers=unrun, device=device)
    else:
        target = load_target(name, dtype=dtype, device=device)
    assert target.tokenizer is not None
    use_template(target.tokenizer, chat_template)
    return target


def check_folder(folder: Path) -> None:
    """Raises InputError, before the work begins, for an output folder that cannot be written."""
    with writing(folder):
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        tempfile.TemporaryFile(dir=there).close()


def check_file(file: Path) -> None:
    """Raises InputError, before the work begins, for an output file that cannot be written."""
    if file.is_dir():
        raise InputError("is a folder", field="output", value=file, fix="name a file")
    check_folder(file.parent)


def announced_device(name: str) -> str:
    """Resolve `--device`; print on stderr when auto selects a GPU."""
    from peagle.model.loader import resolve_device

    device = resolve_device(name)
    if name == "auto" and device != "cpu":
        advice = "the native engine is hardly tried on GPUs (--device cpu selects the CPU)"
        screen.print(f"device: {device}; {advice}")
    return device


def resolve_engine(
    named: Engine | Literal["auto"], python: Path | None, options: Mapping[str, object]
) -> Engine:
    """The engine of `--engine`; what auto selects on a GPU machine is printed on stderr.

    `options`: those of NOT_VLLMS that are given, with their values. What vLLM lacks of them selects
    the native engine with auto, and is refused with vllm.
    """
    lacking = [name for name, value in options.items() if value not in VLLMS.get(name, ())]
    if named == "vllm" and lacking:
        why, fix = NOT_VLLMS[lacking[0]]
        raise InputError(f"vLLM {why}", field=lacking[0], fix=fix)
    if named != "auto":
        return named
    choice = default_engine(python)
    if choice.engine == "vllm" and lacking:
        why = f"vLLM {NOT_VLLMS[lacking[0]][0]}; without {flag(lacking[0])}, vLLM is used"
        screen.print(f"engine: native, because {why}")
        return "native"
    if choice.why and options.get("device") != "cpu":
        screen.print(with_flags(choice.why), markup=False)
    return choice.engine


@contextmanager
def failing(*kinds: type[Exception], kept: str = "") -> Iterator[None]:
    """A failure of one of these kinds is a line, which adds what was `kept`, and exit code 1."""
    try:
        yield
    except kinds as error:
        line = "; ".join(filter(None, (f"peagle: {error}", kept)))
        screen.print(with_flags(line), markup=False)
        raise typer.Exit(1) from error


def warn(text: str) -> None:
    """Print a warning on stderr."""
    screen.print("[yellow]warning:[/]", Text(with_flags(text)))


def print_table(table: Table) -> None:
    """Print a table; wider than a terminal usually is where it goes to a file or a pipe."""
    width = None if console.is_terminal else PIPED_WIDTH
    Console(highlight=False, width=width).print(table)


@contextmanager
def progress_bar(what: str, kept: str = "") -> Iterator[Progress]:
    """A progress bar on stderr; where that is no terminal, a line every LOG_SECONDS. Ctrl-C
    ends it with a line that counts the finished `what`, and adds `kept`."""
    note = TextColumn("{task.description}")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
    bar = Progress(*columns, console=screen, disable=not screen.is_terminal)
    bar.speed_estimate_period = 20 * LOG_SECONDS
    over = Event()
    try:
        with bar:
            Thread(target=_log, args=(bar, what, over)).start()
            yield bar
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{_done(bar, what)} {kept}".strip()) from None
    finally:
        over.set()


def _log(bar: Progress, what: str, over: Event) -> None:
    """Print lines as "12 of 30 answers, 310 tokens/s, 40 s left" where the bar is not shown."""
    while not over.wait(LOG_SECONDS):
        for task in bar.tasks if bar.disable else ():
            left = f"{task.time_remaining:.0f} s left" if task.time_remaining else ""
            parts = (_done(bar, what), task.description, left)
            screen.print(", ".join(filter(None, parts)), markup=False)


def _done(bar: Progress, what: str) -> str:
    return "".join(f"{task.completed:.0f} of {task.total or 0:.0f} {what}" for task in bar.tasks)


@contextmanager
def counting(what: str, total: int | None, kept: str) -> Iterator[Callable[..., None]]:
    """A progress bar for work that reports its progress, the total, and perhaps its tokens."""
    started = time.monotonic()

    def count(done: int, total: int, tokens: int = 0) -> None:
        speed = f"{tokens / (time.monotonic() - started):.0f} tokens/s" if tokens else ""
        bar.update(task, completed=done, total=total, description=speed)

    with progress_bar(what, kept) as bar:
        task = bar.add_task("", total=total)
        yield count


def existing_file(path: Path, field: str) -> Path:
    """`path`. Raises InputError when it is no file."""
    if not path.is_file():
        raise InputError("no such file", field=field, value=path)
    return path

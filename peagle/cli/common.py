"""What several commands share: loading, option types, printing."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle.catalog import choose_head
from peagle.config import InputError
from peagle.data.template import use_template
from peagle.engine.llm import LLM, Run
from peagle.engine.request import RequestFailure, SamplingParams
from peagle.model.checkpoint import find_head

screen = Console(stderr=True, highlight=False, soft_wrap=True)

TargetArgument = Annotated[
    str,
    typer.Argument(
        help="Folder, hub id (owner/name@revision), .gguf file or catalog name.", show_default=False
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head", help="Head: folder or hub id (owner/name@revision). Default: the catalog's."
    ),
]
MethodOption = Annotated[
    str | None, typer.Option("--method", help="p-eagle, eagle3 or none. Default: what the head is.")
]
NoSpeculationOption = Annotated[
    bool, typer.Option("--no-speculation", help="The target alone: --method none.")
]
KOption = Annotated[
    int | None,
    typer.Option("--k", help="Draft tokens a round. Default: as many as pay, round by round."),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Nucleus: keep this much probability.")]
TopKOption = Annotated[int, typer.Option(help="Keep this many tokens; 0 is all.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the random draws.")]
StopOption = Annotated[
    list[str], typer.Option("--stop", help="End before this text; may be given again.")
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="Above 1: less of what is in prompt or answer.")
]
PresencePenaltyOption = Annotated[
    float, typer.Option(help="-2 to 2, off the logits of tokens in the answer.")
]
FrequencyPenaltyOption = Annotated[float, typer.Option(help="The same, for each time they occur.")]
JsonSchemaOption = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="The answer is JSON of this schema."),
]
RegexOption = Annotated[str | None, typer.Option(help="The whole answer matches it.")]
LogprobsOption = Annotated[
    int | None,
    typer.Option(help="With --json: log-probabilities, and of so many likely tokens besides."),
]
MaxTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
QuantizeOption = Annotated[
    str | None, typer.Option(help="int8 or int4 weights in the target's layers; CPU only.")
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja file, or plain: texts one after another. Default: the target's own.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Accept a head trained for another target of the same shape."),
]


def open_llm(
    target: str,
    head: str | None,
    method: str | None,
    k: int | None,
    *,
    no_speculation: bool = False,  # short for the method "none"
    dtype: str = "auto",
    device: str = "cpu",
    quantize: str | None = None,
    force: bool = False,
    chat_template: str | None = None,
    max_batch: int = 8,
    kv_tokens: int | None = None,
) -> LLM:
    """Target and head as the options ask; the head's record is compared with the chat template
    that is used."""
    from transformers.utils import logging

    method = "none" if no_speculation else method
    path = choose_head(target, head, method, k)
    folder = find_head(path) if path else None  # before the target takes its time to load
    logging.disable_progress_bar()
    with screen.status(f"loading {target}"):
        room: dict[str, Any] = {"max_batch": max_batch, "kv_tokens": kv_tokens}
        llm = LLM(target, dtype=dtype, device=device, quantize=quantize, **room)
        use_template(llm.tokenizer, chat_template)
        if folder is None:
            return llm
        drafter = llm.load_head(folder, force=force)
    if method is not None and drafter.config.method != method:
        raise InputError(f"head {path} is a {drafter.config.method} head, not {method}")
    llm.use(drafter, k)
    return llm


def check_answered(run: Run) -> None:
    """Raises RequestFailure when the first answer could not go on."""
    answer = run.completions()[0]
    if answer.failure is not None:
        raise RequestFailure(answer.failure)


def sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None, max_tokens: int
) -> SamplingParams:
    """Sampling parameters from the options."""
    return SamplingParams(temperature, top_p, top_k, min_p, seed, max_tokens)


def progress_bar(what: str) -> Progress:
    """A progress bar on stderr; silent when that is not a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=screen, disable=not screen.is_terminal)


def parse_list(text: str, option: str, least: int = 0) -> list[int]:
    """ "3,7" → [3, 7]."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        why = "expected whole numbers separated by commas"
        raise InputError(f"{option} {text!r}: {why}") from error
    if min(numbers) < least:
        raise InputError(f"{option} {text!r}: each must be at least {least}")
    return numbers


def existing_file(path: Path, option: str) -> Path:
    """`path`, or an error that names the option."""
    if not path.is_file():
        raise InputError(f"{option} {path}: no such file")
    return path

"""What several commands share: loading, option types, printing."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle.catalog import choose_head
from peagle.engine.llm import LLM, Run
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.errors import InputError
from peagle.methods.load import find_head
from peagle.model.loader import resolve_device
from peagle.model.template import use_template

screen = Console(stderr=True, highlight=False, soft_wrap=True)

TargetArgument = Annotated[
    str,
    typer.Argument(
        help="Target model: a folder, a hub id (owner/name@revision), a .gguf file or a catalog "
        "name.",
        show_default=False,
    ),
]
HeadArgument = Annotated[
    str,
    typer.Argument(
        help="Draft head: a folder or a hub id (owner/name@revision).", show_default=False
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="Draft head: a folder or a hub id (owner/name@revision). Default: the catalog's head "
        "for the target.",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Drafting method: p-eagle, eagle3 or none. Default: the method of the head.",
    ),
]
NoSpeculationOption = Annotated[
    bool,
    typer.Option(
        "--no-speculation", help="Decode with the target alone, the same as --method none."
    ),
]
KOption = Annotated[
    int | None,
    typer.Option(
        "--k",
        help="Number of draft tokens per round (num_speculative_tokens). Default: chosen every "
        "round.",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option(help="Sampling temperature, at least 0; 0 is greedy decoding.")
]
TopPOption = Annotated[
    float,
    typer.Option(
        help="Nucleus sampling: keep the smallest set of tokens whose probability reaches this "
        "value (0 to 1)."
    ),
]
TopKOption = Annotated[
    int, typer.Option(help="Number of most likely tokens to sample from; 0 keeps all tokens.")
]
MinPOption = Annotated[
    float,
    typer.Option(
        help="Drop tokens less likely than this fraction (0 to 1) of the most likely token's "
        "probability."
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Seed of the random number generator. Default: a new one for every run."),
]
StopOption = Annotated[
    list[str],
    typer.Option(
        "--stop", help="Text at which generation stops; repeat the option for several texts."
    ),
]
RepetitionPenaltyOption = Annotated[
    float,
    typer.Option(
        help="Penalty on tokens that occur in the prompt or the answer, above 0; 1 is none."
    ),
]
PresencePenaltyOption = Annotated[
    float,
    typer.Option(
        help="Amount subtracted from the logit of each token that occurs in the answer (-2 to 2)."
    ),
]
FrequencyPenaltyOption = Annotated[
    float,
    typer.Option(
        help="Amount subtracted from a token's logit for each time it occurs in the answer (-2 to "
        "2)."
    ),
]
JsonSchemaOption = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="File with a JSON schema that the answer must satisfy (structured output).",
    ),
]
RegexOption = Annotated[
    str | None, typer.Option(help="Regular expression that the whole answer must match.")
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        help="Number of most likely tokens whose log-probabilities are printed with each token; "
        "needs --json."
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option(help="Maximum number of tokens generated for one answer.")
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Data type of the weights: auto (as in the checkpoint), float32, bfloat16 or float16."
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="Device to run on: auto, cpu, cuda or cuda:N. Auto is cuda where torch sees a GPU, "
        "else cpu."
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="Weight quantization of the target's decoder layers: int8 or int4, on the CPU only. "
        "Default: none."
    ),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Chat template: a Jinja file, or plain, which joins the messages' texts. Default: the "
        "target's own.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Accept a head that was trained for another target of the same sizes.",
    ),
]


def open_llm(
    target: str,
    head: str | None,
    method: str | None = None,  # None: of the head
    k: int | None = None,
    *,
    no_speculation: bool = False,  # short for the method "none"
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    force: bool = False,
    chat_template: str | None = None,
    max_batch: int | None = None,  # None: LLM's default
    kv_tokens: int | None = None,
) -> LLM:
    """Load the target and the head that the options name. The head's record is compared with the
    chat template that is used."""
    from transformers.utils import logging

    method = "none" if no_speculation else method
    path = choose_head(target, head, method, k)
    folder = find_head(path) if path else None  # before the target takes its time to load
    device = announced_device(device)
    check_quantize_device(quantize, device)
    logging.disable_progress_bar()
    with screen.status(f"loading {target}"):
        llm = LLM(
            target,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
            dtype=dtype,
            device=device,
            quantize=quantize,
        )
        use_template(llm.tokenizer, chat_template)
        drafter = None if folder is None else llm.load_head(folder, force=force)
    if drafter is not None and method is not None and drafter.config.method != method:
        raise InputError(f"head {path} is a {drafter.config.method} head, not {method}")
    return llm if drafter is None else llm.use(drafter, k)


def announced_device(name: str) -> str:
    """The device of `--device`; auto says on stderr when it selects a GPU."""
    device = resolve_device(name)
    if name == "auto" and device != "cpu":
        screen.print(
            f"device: {device}; the native engine has not yet been run on a GPU "
            "(--device cpu selects the CPU)"
        )
    return device


def check_quantize_device(quantize: str | None, device: str) -> None:
    """Raises InputError when quantised weights are asked for on a GPU."""
    if quantize is not None and resolve_device(device) != "cpu":
        raise InputError(f"--quantize {quantize}: runs on the CPU only, add --device cpu")


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

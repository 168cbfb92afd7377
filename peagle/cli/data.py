"""`peagle data`: make training data, and look at it."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.text import Text

from peagle.cli.capture import capture
from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    HeadOption,
    JsonOption,
    MaxTokensOption,
    MinPOption,
    TargetArgument,
    TemperatureOption,
    TopKOption,
    TopPOption,
    existing_file,
    open_llm,
    progress_bar,
    screen,
)
from peagle.cli.generate import console
from peagle.config import InputError
from peagle.data.dataset import read_conversations
from peagle.data.endpoint import Servers, connect
from peagle.data.regenerate import Engine, Report
from peagle.data.regenerate import regenerate as run_regenerate
from peagle.data.show import documents_of, nth_record, pieces, summarize
from peagle.data.synth import MIX, SynthConfig, synthesize
from peagle.data.template import (
    check_template,
    check_template_args,
    load_tokenizer,
    use_template,
)
from peagle.data.vllm import vllm_engine
from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make training data, and look at it."
)
SystemOption = Annotated[str | None, typer.Option("--system", help="System prompt.")]
TemplateArgsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-arg",
        metavar="NAME=VALUE",
        help="For the chat template: enable_thinking=false.",
    ),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Prompts answered together.")]
OutputOption = Annotated[
    Path, typer.Option(help="JSONL to append to; what is in it is not made again.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the random draws.")]


@app.callback()
def data() -> None:
    """Make training data, and look at it."""


@app.command()
def synth(
    target: TargetArgument,
    output: OutputOption,
    count: Annotated[int, typer.Option(help="Records the file is to hold.")] = 1000,
    mix: Annotated[str, typer.Option(help="Share of each kind of prompt.")] = ",".join(
        f"{kind}={share}" for kind, share in MIX.items()
    ),
    head: HeadOption = None,
    temperature: Annotated[float, typer.Option(help="Of the user's turns, above 0.")] = 0.9,
    top_p: TopPOption = 0.95,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    prompt_tokens: Annotated[int, typer.Option(help="Longest user turn, in tokens.")] = 256,
    max_tokens: MaxTokensOption = 512,
    seed: SeedOption = 0,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    chat_template_arg: TemplateArgsOption = None,
    batch: BatchOption = 16,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Let the target write prompts itself, and answer them: training data from nothing."""
    args = _pairs(chat_template_arg or [], "--chat-template-arg")
    user = SamplingParams(temperature, top_p, top_k, min_p, max_tokens=prompt_tokens)
    config = SynthConfig(count, _mix(mix), user, max_tokens, seed, system, args)
    SamplingParams(max_tokens=max_tokens)  # checked before anything is loaded
    llm = open_llm(
        target, head, None, None, dtype=dtype, device=device, chat_template=chat_template
    )
    llm.max_batch = batch
    with progress_bar("records") as bar:
        task = bar.add_task("", total=count)
        report = synthesize(
            llm, output, config, lambda done, total: bar.update(task, completed=done, total=total)
        )
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(report.kinds.items()))
    screen.print(f"wrote {report.written} records to {output}, which has {kinds}")
    if report.refused:
        why = ", ".join(f"{number} {why}" for why, number in report.refused.most_common())
        screen.print(f"drafts not used: {report.refused.total()} ({why})")


@app.command()
def regenerate(
    target: TargetArgument,
    prompts: Annotated[
        Path, typer.Option(help='JSONL of {"turns": [...]} or conversations, plain or .gz.')
    ],
    output: OutputOption,
    engine: Annotated[str, typer.Option(help="native or vllm, in this process.")] = "native",
    url: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible endpoint, http://host/v1; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Its name there. Default: the only one.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Requests at a time to a URL.")] = 8,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the URL's API key.")
    ] = None,
    head: HeadOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First N records only.")] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = 512,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    chat_template_arg: TemplateArgsOption = None,
    batch: BatchOption = 16,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Let the target answer prompts: the text its drafter must learn to predict."""
    existing_file(prompts, "--prompts")
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    args = _pairs(chat_template_arg or [], "--chat-template-arg")
    conversations = read_conversations(prompts, system, args)
    source: LLM | Engine | Servers
    if url:
        here = {"--head": head, "--chat-template": chat_template}
        here["--engine"] = None if engine == "native" else engine
        for option in (name for name, given in here.items() if given is not None):
            raise InputError(f"{option} with --url: the endpoint has its own")
        key = _api_key(api_key_env)
        source = connect(url, model, prefer=target, workers=workers, api_key=key)
    elif engine == "vllm":
        tokenizer = load_tokenizer(target)
        use_template(tokenizer, chat_template)
        _check_template(tokenizer, args)
        source = vllm_engine(target, tokenizer)
    elif engine == "native":
        source = open_llm(
            target, head, None, None, dtype=dtype, device=device, chat_template=chat_template
        )
        source.max_batch = batch
        _check_template(source.tokenizer, args)
    else:
        raise InputError(f"--engine {engine!r}: choose native or vllm, or name a --url")
    with progress_bar("records") as bar:
        task = bar.add_task("", total=None)
        report = run_regenerate(
            source,
            conversations,
            output,
            params,
            limit,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    _tell(report, output)


def _tell(report: Report, output: Path) -> None:
    screen.print(f"wrote {report.answers} answers to {output}")
    if report.truncated:
        screen.print(f"asked without their oldest turns, to fit the context: {report.truncated}")
    if report.skipped:
        screen.print(f"[yellow]warning:[/] turns left out, too long even alone: {report.skipped}")
    for problem in report.problems:
        screen.print("[yellow]warning:[/]", Text(problem))
    if report.failed:
        screen.print(f"records without an answer: {report.failed}; run again to ask for them")
        raise typer.Exit(1)


app.command()(capture)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="JSONL of answers or conversations.")],
    target: Annotated[str, typer.Option(help="Whose tokenizer and chat template to read it with.")],
    record: Annotated[
        int | None, typer.Option(min=1, help="Show this record's tokens, counted from 1.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=4, help="Cut documents as `train --max-length` does.")
    ] = None,
    chat_template: ChatTemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a data file holds; with --record, which tokens of one conversation are trained on."""
    existing_file(file, "data file")
    tokenizer = load_tokenizer(target)
    use_template(tokenizer, chat_template)
    if record is not None:
        _show_record(nth_record(file, record), tokenizer, max_length, as_json)
        return
    summary = asdict(summarize(file, tokenizer, max_length))
    if as_json:
        typer.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    reasons = summary.pop("reasons")
    for name, value in summary.items():
        typer.echo(f"{name.replace('_', ' '):14} {_counts(value, summary['records'])}")
    for reason in reasons:
        typer.echo(f"  {reason}")


def _counts(value: int | dict[str, int], records: int) -> str:
    """A number, or percentiles, or the records of each kind with their shares."""
    if not isinstance(value, dict):
        return str(value)
    shares = not any(name == "p50" for name in value)
    parts = (f"{name} {n}" + f" ({n / records:.0%})" * shares for name, n in value.items())
    return ", ".join(parts) or "none given"


def _show_record(
    record: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int | None,
    as_json: bool,
) -> None:
    shown = []
    for whole, used in documents_of(record, tokenizer, max_length):
        texts = list(pieces(used, tokenizer))
        counts = {"tokens": len(used.ids), "answer_tokens": sum(used.supervised)}
        counts["cut_tokens"] = len(whole.ids) - len(used.ids)
        shown.append({**counts, **used._asdict(), "pieces": [piece._asdict() for piece in texts]})
        if not as_json:
            for text, supervised in texts:
                if console.is_terminal:
                    console.print(Text(text, style="green" if supervised else "dim"), end="")
                else:
                    typer.echo(f"⟦{text}⟧" if supervised else text, nl=False)
            cut = f", {counts['cut_tokens']} cut" * bool(counts["cut_tokens"])
            marked = "green" if console.is_terminal else "in ⟦⟧"
            trained = f"{counts['answer_tokens']} of them trained on ({marked})"
            typer.echo(f"\n--- {counts['tokens']} tokens, {trained}{cut}")
    if as_json:
        typer.echo(json.dumps({"documents": shown}, ensure_ascii=False))


def _check_template(tokenizer: "PreTrainedTokenizerBase", args: dict[str, Any]) -> None:
    check_template(tokenizer)
    check_template_args(tokenizer, args)


def _pairs(texts: list[str], option: str) -> dict[str, Any]:
    """["a=1"] → {"a": 1}, values as in YAML."""
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        if not equals or not name or name in pairs:
            raise InputError(f"{option} {text!r}: expected name=value, each name once")
        try:
            pairs[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(f"{option} {text!r}: the value is not YAML") from error
    return pairs


def _mix(text: str) -> dict[str, float]:
    """ "chat=2,code=1" → shares."""
    mix = _pairs(text.split(","), "--mix")
    for kind, share in mix.items():
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise InputError(f"--mix {kind}={share}: expected a number")
    return mix


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise InputError(f"--api-key-env {variable}: the variable is not set")
    return key

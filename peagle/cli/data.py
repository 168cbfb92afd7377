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
from peagle.data.dataset import read_conversations
from peagle.data.endpoint import Servers, connect
from peagle.data.regenerate import Engine, Report, through_vllm
from peagle.data.regenerate import regenerate as run_regenerate
from peagle.data.show import documents_of, nth_record, pieces, summarize
from peagle.data.synth import MIX, SynthConfig, synthesize
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.errors import InputError
from peagle.model.template import (
    check_template,
    check_template_args,
    load_tokenizer,
    use_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make training data, and inspect it."
)
SystemOption = Annotated[
    str | None, typer.Option("--system", help="System prompt of every conversation. Default: none.")
]
TemplateArgsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-arg",
        metavar="NAME=VALUE",
        help="Argument of the chat template, such as enable_thinking=false; repeat the option for "
        "several arguments.",
    ),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Number of prompts decoded together.")]
OutputOption = Annotated[
    Path, typer.Option(help="JSONL file to append to; records that it holds are not made again.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the random number generator.")]


@app.callback()
def data() -> None:
    """Make training data, and inspect it."""


@app.command()
def synth(
    target: TargetArgument,
    output: OutputOption,
    count: Annotated[int, typer.Option(help="Number of records that the file is to hold.")] = 1000,
    mix: Annotated[
        str, typer.Option(help="Weight of each kind of prompt, as kind=weight.")
    ] = ",".join(f"{kind}={share}" for kind, share in MIX.items()),
    head: HeadOption = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature of the user's turns, above 0.")
    ] = 0.9,
    top_p: TopPOption = 0.95,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    prompt_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of a user's turn.")
    ] = 256,
    max_tokens: MaxTokensOption = 512,
    seed: SeedOption = 0,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    chat_template_arg: TemplateArgsOption = None,
    batch: BatchOption = 16,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Let the target write prompts and answer them: training data without any prompts of yours."""
    args = _pairs(chat_template_arg or [], "--chat-template-arg")
    user = SamplingParams(temperature, top_p, top_k, min_p, max_tokens=prompt_tokens)
    config = SynthConfig(count, _mix(mix), user, max_tokens, seed, system, args)
    SamplingParams(max_tokens=max_tokens)  # checked before anything is loaded
    llm = open_llm(
        target,
        head,
        dtype=dtype,
        device=device,
        chat_template=chat_template,
        max_batch=batch,
    )
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
        Path, typer.Option(help='JSONL file of {"turns": [...]} or conversations, plain or .gz.')
    ],
    output: OutputOption,
    engine: Annotated[str, typer.Option(help="Engine in this process: native or vllm.")] = "native",
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server, as http://host:8000/v1; repeat the "
            "option for several servers. Default: the engine in this process."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name at --url. Default: the only model there.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of concurrent requests to each URL.")
    ] = 8,
    api_key_env: Annotated[
        str | None, typer.Option(help="Name of the environment variable with the API key of --url.")
    ] = None,
    head: HeadOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of records to answer. Default: all.")
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = 512,
    system: SystemOption = None,
    chat_template: ChatTemplateOption = None,
    chat_template_arg: TemplateArgsOption = None,
    batch: BatchOption = 16,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
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
        source = through_vllm(target, tokenizer)
    elif engine == "native":
        source = open_llm(
            target,
            head,
            dtype=dtype,
            device=device,
            chat_template=chat_template,
            max_batch=batch,
        )
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
    file: Annotated[Path, typer.Argument(help="JSONL file of answers or conversations.")],
    target: Annotated[
        str, typer.Option(help="Target model whose tokenizer and chat template are used.")
    ],
    record: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of the record whose tokens are shown, from 1. Default: a summary."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=4,
            help="Maximum length of a document in tokens, as `train` has it. Default: none.",
        ),
    ] = None,
    chat_template: ChatTemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Summarise a data file; with --record, show which tokens of a record are trained on."""
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

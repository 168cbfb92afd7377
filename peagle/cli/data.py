"""`peagle data`: make training data, and look at it."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from peagle.cli.capture import capture
from peagle.cli.common import (
    WRITTEN,
    ChatTemplateOption,
    JsonOption,
    ModelOptions,
    StrictOption,
    TargetArgument,
    console,
    counting,
    existing_file,
    open_llm,
    screen,
)
from peagle.cli.options import App, Fields, check_at_least, with_flags
from peagle.cli.settings import read_pairs
from peagle.data.dataset import documents_of, read_conversations
from peagle.data.endpoint import Servers, connect
from peagle.data.regenerate import Engine, Report, through_vllm
from peagle.data.regenerate import regenerate as run_regenerate
from peagle.data.show import nth_record, pieces, summarize
from peagle.data.synth import MIX, SynthConfig, synthesize
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.errors import InputError
from peagle.model.template import check_template, check_template_args, load_tokenizer, use_template

app = App(no_args_is_help=True, help="Make training data, and inspect it.")
MODEL = Fields("head", "chat_template", "dtype", "device")
USER = SynthConfig().user  # how user turns are sampled by default
TemplateArgsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-arg",
        metavar="NAME=VALUE",
        help="Argument of the chat template, such as enable_thinking=false; repeat the option for "
        "several arguments.",
    ),
]
BatchOption = Annotated[int, "Number of prompts decoded together."]
OutputOption = Annotated[Path, "JSONL file to append to; records that it holds are not made again."]


@app.callback()
def data() -> None:
    """Make training data, and inspect it."""


@app.command()
def synth(
    target: TargetArgument,
    *,
    output: OutputOption,
    config: Annotated[SynthConfig, Fields("count", "max_tokens", "seed", "system")],
    mix: str = ",".join(f"{kind}={share}" for kind, share in MIX.items()),
    temperature: float = USER.temperature,
    user: Annotated[SamplingParams, Fields("top_k", "min_p", top_p=USER.top_p)],
    prompt_tokens: int = USER.max_tokens,
    chat_template_arg: TemplateArgsOption = None,
    model: Annotated[ModelOptions, MODEL],
    batch: BatchOption = 16,
) -> None:
    """Let the target write prompts and answer them: training data without any prompts of yours.

    mix: Weight of each kind of prompt, as kind=weight.
    temperature: Sampling temperature of the user's turns, above 0.
    prompt_tokens: Maximum number of tokens of a user's turn.
    """
    check_at_least(1, batch=batch, max_tokens=config.max_tokens, prompt_tokens=prompt_tokens)
    user = replace(user, temperature=temperature, max_tokens=prompt_tokens)
    args = read_pairs(chat_template_arg or [], "chat_template_arg")
    config = replace(config, mix=_mix(mix), user=user, template_args=args)
    llm = open_llm(target, model, max_batch=batch)
    with counting("records", config.count, WRITTEN) as count:
        report = synthesize(llm, output, config, count)
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(report.kinds.items()))
    screen.print(f"wrote {report.written} records to {output}, which has {kinds}")
    if report.refused:
        why = ", ".join(f"{number} {why}" for why, number in report.refused.most_common())
        screen.print(f"drafts not used: {report.refused.total()} ({why})")


@app.command()
def regenerate(
    target: TargetArgument,
    *,
    prompts: Path,
    output: OutputOption,
    engine: Literal["native", "vllm"] = "native",
    url: list[str] | None = None,
    model: str | None = None,
    workers: int = 8,
    api_key_env: str | None = None,
    limit: int | None = None,
    sampling: Annotated[SamplingParams, Fields("temperature", "top_p", seed=0, max_tokens=512)],
    system: str | None = None,
    strict: StrictOption = False,
    chat_template_arg: TemplateArgsOption = None,
    options: Annotated[ModelOptions, MODEL],
    batch: BatchOption = 16,
) -> None:
    """Let the target answer prompts: the text its drafter must learn to predict.

    prompts: JSONL file of {"turns": [...]} or conversations, plain or .gz.
    engine: Engine in this process: native or vllm.
    url: Base URL of an OpenAI-compatible server, as http://host:8000/v1; repeat the option for
        several servers. Default: the engine in this process.
    model: Model name at --url. Default: the only model there.
    workers: Number of concurrent requests to each URL.
    api_key_env: Name of the environment variable with the API key of --url.
    limit: Number of records to answer. Default: all.
    system: System prompt of every conversation. Default: none.
    """
    existing_file(prompts, "prompts")
    check_at_least(1, workers=workers, limit=limit, batch=batch)
    args = read_pairs(chat_template_arg or [], "chat_template_arg")
    source: LLM | Engine | Servers
    if url:
        _check_no_engine(engine, options)
        key = _api_key(api_key_env)
        source = connect(url, model, prefer=target, workers=workers, api_key=key)
    elif engine == "vllm":
        loaded = load_tokenizer(target)
        use_template(loaded, options.chat_template)
        _check_template(loaded, args)
        source = through_vllm(target, loaded)
    else:
        source = open_llm(target, options, max_batch=batch)
        _check_template(source.tokenizer, args)
    tokenizer = None if isinstance(source, Servers) else source.tokenizer
    conversations = read_conversations(prompts, system, args, tokenizer=tokenizer, strict=strict)
    with counting("answers", None, WRITTEN) as count:
        report = run_regenerate(source, conversations, output, sampling, limit, count)
    _print_report(report, output)


def _check_no_engine(engine: str, options: ModelOptions) -> None:
    """Raises InputError for options that the server decides itself."""
    named = {"head": options.head, "chat_template": options.chat_template}
    if engine != "native":
        named["engine"] = engine
    for field, value in named.items():
        if value is not None:
            why = "the server at `url` has its own"
            raise InputError(why, field=field, value=value, fix="leave it out")


def _print_report(report: Report, output: Path) -> None:
    screen.print(f"wrote {report.answers} answers to {output}")
    if report.truncated:
        screen.print(f"answered without their oldest turns, to fit the context: {report.truncated}")
    if report.skipped:
        screen.print(f"[yellow]warning:[/] turns left out, too long even alone: {report.skipped}")
    for problem in report.problems:
        screen.print("[yellow]warning:[/]", Text(with_flags(problem)))
    if report.failed:
        screen.print(f"records without an answer: {report.failed}; run again to ask for them")
        raise typer.Exit(1)


app.command()(capture)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="JSONL file of answers or conversations.")],
    *,
    target: str,
    record: int | None = None,
    max_length: int | None = None,
    chat_template: ChatTemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Summarise a data file; with --record, show which tokens of a record are trained on.

    target: Target model whose tokenizer and chat template are used.
    record: Number of the record whose tokens are shown, from 1. Default: a summary.
    max_length: Maximum length of a document in tokens, as `train` has it. Default: none.
    """
    existing_file(file, "file")
    check_at_least(1, record=record)
    check_at_least(4, max_length=max_length)
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
    tokenizer: PreTrainedTokenizerBase,
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


def _check_template(tokenizer: PreTrainedTokenizerBase, args: dict[str, Any]) -> None:
    check_template(tokenizer)
    check_template_args(tokenizer, args)


def _mix(text: str) -> dict[str, float]:
    """ "chat=2,code=1" → shares."""
    mix = read_pairs(text.split(","), "mix")
    for kind, share in mix.items():
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise InputError("expected a number", field="mix", value=f"{kind}={share}")
    return mix


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise InputError("the variable is not set", field="api_key_env", value=variable)
    return key

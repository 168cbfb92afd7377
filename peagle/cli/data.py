"""`peagle data`: make training data, and look at it."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from transformers import PreTrainedTokenizerBase

from peagle.cli import common
from peagle.cli.capture import capture
from peagle.cli.options import App, Fields, refuse_idle
from peagle.data.dataset import documents_of, mixed, read_conversations
from peagle.data.endpoint import Servers, connect
from peagle.data.example import Example
from peagle.data.records import check_plain, is_hub_name, read_records
from peagle.data.regenerate import Report
from peagle.data.regenerate import regenerate as run_regenerate
from peagle.data.synth import SynthConfig, synthesize
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.errors import InputError, check_at_least, first_line
from peagle.model.loader import load_tokenizer
from peagle.model.template import check_template, check_template_args, use_template

app = App(no_args_is_help=True, help="Make training data, and inspect it.")
PERCENTILES = (0, 10, 50, 90, 99, 100)  # of the lengths of documents
MAX_REASONS = 5  # records that cannot be used, shown by `data show`
MODEL = Fields("head", "chat_template", "dtype", "device", "force")
OF_SERVERS = ("model", "workers", "api_key_env")  # options that do nothing without a URL
TemplateArgsOption = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")]


@app.command()
def synth(
    target: str,
    *,
    output: Path,
    config: Annotated[SynthConfig, Fields("count", "max_tokens", "seed", "system")],
    chat_template_arg: TemplateArgsOption = None,
    model: Annotated[common.ModelOptions, MODEL],
) -> None:
    """Let the target write prompts and answer them: training data without any prompts of yours.

    output: JSONL file to append to; records that it holds are not made again.
    """
    check_plain(output)
    config = replace(config, template_args=template_args(chat_template_arg or []))
    llm = common.open_llm(target, model)
    check_template_args(llm.tokenizer, config.template_args)
    with common.counting("records", config.count, common.WRITTEN) as count:
        report = synthesize(llm, output, config, count)
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(report.kinds.items()))
    common.screen.print(f"wrote {report.written} records to {output}, which has {kinds}")
    if report.refused:
        why = ", ".join(f"{number} {why}" for why, number in report.refused.most_common())
        common.screen.print(f"drafts not used: {report.refused.total()} ({why})")


@app.command()
def regenerate(
    context: typer.Context,
    target: str,
    *,
    prompts: list[str],
    output: Path,
    url: list[str] | None = None,
    model: str | None = None,
    workers: int = 8,
    api_key_env: str | None = None,
    limit: int | None = None,
    sampling: Annotated[SamplingParams, Fields("temperature", "top_p", seed=0, max_tokens=512)],
    system: str | None = None,
    strict: bool = False,
    chat_template_arg: TemplateArgsOption = None,
    options: Annotated[common.ModelOptions, MODEL],
) -> None:
    """Let the target answer prompts: the text its drafter must learn to predict.

    prompts: Prompts: a JSONL file of {"turns": [...]} or conversations, plain or .gz, or a dataset
        of the hub, as owner/name, owner/name/config or owner/name/config/split. Repeat the option
        for several; with weights, as NAME=2, each next prompt is drawn by them (and by --seed),
        until that source has no more.
    output: JSONL file to append to; records that it holds are not made again.
    url: Base URL of an OpenAI-compatible server (`vllm serve`), as http://host:8000/v1; repeat the
        option for several servers. Default: the engine in this process.
    model: Model name at --url. Default: the only model there.
    workers: Number of concurrent requests to each URL.
    api_key_env: Name of the environment variable with the API key of --url.
    limit: Number of records to answer. Default: all.
    system: System prompt of conversations without one. Default: none.
    """
    sources = [_weighted(os.path.expanduser(source)) for source in prompts]
    check_at_least(1, workers=workers, limit=limit)
    check_plain(output)
    args = template_args(chat_template_arg or [])
    source: LLM | Servers
    if url:
        refuse_idle(context, sorted(MODEL.names), "with `url`")
        key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not key:
            raise InputError("the variable is not set", field="api_key_env", value=api_key_env)
        source = connect(url, model, prefer=target, workers=workers, api_key=key)
        tokenizer = None
    else:
        refuse_idle(context, OF_SERVERS, "without `url`")
        source = common.open_llm(target, options)
        tokenizer = source.tokenizer
        check_template_args(tokenizer, args)
    most = limit if all(weight is None for _, weight in sources) else None
    how: dict[str, Any] = {"tokenizer": tokenizer, "strict": strict, "limit": most}
    read = [(read_conversations(name, system, args, **how), weight) for name, weight in sources]
    conversations = mixed(read, sampling.seed)[:limit]
    with common.counting("answers", None, common.WRITTEN) as count:
        report = run_regenerate(source, conversations, output, sampling, count)
    _print_report(report, output)


def template_args(texts: list[str]) -> dict[str, Any]:
    """["a=1"] → {"a": 1}, values as in YAML."""
    args = dict[str, Any]()
    for text in texts:
        name, equals, value = text.strip().partition("=")
        if not equals or not name or name in args:
            why = "expected name=value, each name once"
            raise InputError(why, field="chat_template_arg", value=text)
        try:
            # Dates and the like are texts: a record is JSON.
            args[name] = json.loads(json.dumps(yaml.safe_load(value), default=str))
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            raise InputError(first_line(error), field="chat_template_arg", value=value) from error
    return args


def _weighted(source: str) -> tuple[str, float | None]:
    """ "name=2" → ("name", 2.0). Raises InputError for a weight that is none, or no such file."""
    name = source
    share = None
    if "=" in source and not Path(source).is_file():
        name, _, weight = source.rpartition("=")
        share = float(weight) if re.fullmatch(r"\d*\.?\d+", weight) else 0.0
        if not share:
            raise InputError("its weight must be above 0", field="prompts", value=source)
    if not is_hub_name(Path(name)):
        common.existing_file(Path(name), "prompts")
    return name, share


def _print_report(report: Report, output: Path) -> None:
    common.screen.print(f"wrote {report.answers} answers to {output}")
    for problem in report.problems:
        common.warn(problem)
    if report.skipped:
        common.warn(f"turns left out, too long to answer or failed: {report.skipped}")
    if report.failed:
        failed = f"records without an answer: {report.failed}; run again to ask for them"
        common.screen.print(failed)
        raise typer.Exit(1)


app.command()(capture)


@app.command()
def show(
    file: Path,
    *,
    target: str,
    record: int | None = None,
    max_length: int | None = None,
    chat_template: str | None = None,
    as_json: common.JsonOption = False,
) -> None:
    """Summarise a data file; with --record, show which tokens of a record are trained on.

    file: JSONL file of answers or conversations.
    target: Target model whose tokenizer and chat template are used.
    record: Number of the record whose tokens are shown, from 1. Default: a summary.
    max_length: Maximum length of a document in tokens, as `peagle train` has it. Default: none.
    """
    common.existing_file(file, "file")
    check_at_least(1, record=record)
    check_at_least(4, max_length=max_length)
    tokenizer = load_tokenizer(target)
    use_template(tokenizer, chat_template)
    if record is not None:
        _show_record(nth_record(file, record), tokenizer, max_length, as_json)
        return
    summary = summarize(file, tokenizer, max_length)
    if as_json:
        typer.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    reasons = summary.pop("reasons")
    summary["lengths"] = ", ".join(f"{name} {n}" for name, n in summary["lengths"].items())
    for name, value in summary.items():
        typer.echo(f"{name.replace('_', ' '):14} {value}")
    for reason in reasons:
        typer.echo(f"  {reason}")


def _show_record(
    record: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    as_json: bool,
) -> None:
    shown = []
    for whole, used in documents_of(record, tokenizer, max_length):
        texts = list(pieces(used, tokenizer))
        parts = [{"text": text, "supervised": mine} for text, mine in texts]
        counts = {"tokens": len(used.ids), "answer_tokens": sum(used.supervised)}
        counts["cut_tokens"] = len(whole.ids) - len(used.ids)
        shown.append({**counts, **used._asdict(), "pieces": parts})
        if not as_json:
            typer.echo("".join(f"⟦{text}⟧" if mine else text for text, mine in texts))
            cut = f", {counts['cut_tokens']} cut" * bool(counts["cut_tokens"])
            trained = f"{counts['answer_tokens']} of them trained on (in ⟦⟧)"
            typer.echo(f"--- {counts['tokens']} tokens, {trained}{cut}")
    if as_json:
        typer.echo(json.dumps({"documents": shown}, ensure_ascii=False))


def summarize(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> dict[str, Any]:
    """Read a data file as training does, and count: records and the documents that can be trained
    on, their tokens and answer tokens, those that are cut, percentiles of their lengths before the
    cut, unusable records and the first reasons.

    Raises InputError for a line that is not JSON, or a conversation without a chat template.
    """
    counts = dict.fromkeys(("records", "documents", "tokens", "answer_tokens", "cut"), 0)
    lengths: list[int] = []
    reasons: list[str] = []
    for record in read_records(path):
        counts["records"] += 1
        if record.get("answer_ids") is None:
            check_template(tokenizer)  # it is not the record that is at fault
        try:
            documents = documents_of(record, tokenizer, max_length)
        except InputError as error:
            reasons.append(f"record {counts['records']}: {error}")
            continue
        for whole, used in documents:
            lengths.append(len(whole.ids))
            counts["documents"] += 1
            counts["cut"] += len(used.ids) < len(whole.ids)
            counts["tokens"] += len(used.ids)
            counts["answer_tokens"] += sum(used.supervised)
    if not counts["records"]:
        raise InputError("no records: the file is empty", value=path)
    ranked = np.percentile(lengths or [0], PERCENTILES, method="nearest").tolist()
    shares = {f"p{percent}": n for percent, n in zip(PERCENTILES, ranked, strict=True)}
    return counts | {"lengths": shares, "unusable": len(reasons), "reasons": reasons[:MAX_REASONS]}


def nth_record(path: Path, number: int) -> dict[str, Any]:
    """Return record `number` of a file, counted from 1 as errors do."""
    for record in islice(read_records(path), number - 1, None):
        return record
    raise InputError(f"{path} has fewer records", field="record", value=number)


def pieces(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Split a document's text, special tokens included, where supervision begins or ends; yield
    each text, and whether it is supervised."""
    pairs = zip(example.ids, example.supervised, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        yield tokenizer.decode([token for token, _ in run]), supervised

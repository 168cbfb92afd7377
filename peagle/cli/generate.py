"""`peagle generate`: complete one prompt, streaming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    FrequencyPenaltyOption,
    HeadOption,
    JsonOption,
    JsonSchemaOption,
    KOption,
    LogprobsOption,
    MaxTokensOption,
    MethodOption,
    MinPOption,
    NoSpeculationOption,
    PresencePenaltyOption,
    QuantizeOption,
    RegexOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    TargetArgument,
    TemperatureOption,
    TopKOption,
    TopPOption,
    check_answered,
    existing_file,
    open_llm,
    sampling,
)
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM, Run
from peagle.errors import InputError

app = typer.Typer(add_completion=False)
console = Console(highlight=False, soft_wrap=True)


@app.command()
def generate(
    target: TargetArgument,
    prompt: Annotated[
        str, typer.Option(help="Text of the user's message, or the text to continue with --raw.")
    ],
    head: HeadOption = None,
    method: MethodOption = None,
    no_speculation: NoSpeculationOption = False,
    k: KOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    chat_template: ChatTemplateOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = 256,
    stop: StopOption = [],  # noqa: B006 (typer copies it)
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    logprobs: LogprobsOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt. Accepted draft tokens are green; the rest is the target's own."""
    if logprobs is not None and not as_json:
        raise InputError(f"--logprobs {logprobs}: they are part of the JSON, add --json")
    params = replace(
        sampling(temperature, top_p, top_k, min_p, seed, max_tokens),
        stop=tuple(stop),
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        json_schema=None if json_schema is None else read_schema(json_schema),
        regex=regex,
        logprobs=logprobs,
    )
    if not prompt.strip():
        raise InputError("--prompt is empty: give it a text")
    llm = open_llm(
        target,
        head,
        method,
        k,
        no_speculation=no_speculation,
        dtype=dtype,
        device=device,
        quantize=quantize,
        force=force,
        chat_template=chat_template,
    )
    ids = prompt if raw else prompt_ids(llm.tokenizer, [{"role": "user", "content": prompt}])
    run = llm.stream([ids], params)
    if as_json:
        for _ in run:
            pass
        typer.echo(json.dumps(summary(run), ensure_ascii=False))
        check_answered(run)
        return
    show(run)
    check_answered(run)
    console.print(f"[dim]{last_line(llm, run)}[/]")


def read_schema(path: Path) -> str:
    """The text of a file; whether it is a schema is seen later."""
    try:
        return existing_file(path, "--json-schema").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--json-schema {path}: not UTF-8 text, give a JSON file") from error


def show(run: Run) -> None:
    """Print the stream, accepted draft tokens in green (plain text when not a terminal).

    Not through rich, which would expand tabs and emoji names in what the model said.
    """
    for chunk in run:
        typer.secho(chunk.text, nl=False, fg="green" if chunk.drafted else None)
    typer.echo()


def summary(run: Run) -> dict[str, object]:
    """What `--json` prints."""
    answer = run.completions()[0]
    shown: dict[str, object] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "output_tokens": len(answer.token_ids),
        "rounds": answer.stats.rounds,
        "acceptance_length": round(answer.stats.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in answer.stats.accepted_per_position],
        "tokens_per_second": round(len(answer.token_ids) / run.seconds, 2),
        "finish_reason": answer.finish_reason,
    }
    if answer.logprobs is not None:
        shown["logprobs"] = [
            {"token": token, "logprob": p, "top": [{"token": t, "logprob": q} for t, q in top]}
            for token, p, top in answer.logprobs
        ]
    return shown


def last_line(llm: LLM, run: Run) -> str:
    """How drafting fared, in one line."""
    result = summary(run)
    most = f"K ≤ {llm.k}" if llm.adaptive else f"K = {llm.k}"
    drafting = f"{llm.method}, {most}, acceptance length {result['acceptance_length']}, "
    drafting = drafting if llm.k else "no drafting, "
    return f"{drafting}{result['output_tokens']} tokens, {result['tokens_per_second']} tok/s"

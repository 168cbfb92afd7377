"""`peagle generate`: complete one prompt, streaming."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from peagle.bench.summary import acceptance_row
from peagle.cli.common import (
    JsonOption,
    ModelOptions,
    TargetArgument,
    check_answered,
    console,
    existing_file,
    open_llm,
)
from peagle.cli.options import App, Fields
from peagle.cli.show_tree import show_trees
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Chunk
from peagle.engine.run import Run
from peagle.errors import InputError
from peagle.model.template import check_template
from peagle.shown import mean_length

app = App()
SAMPLING = Fields(
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "regex", "logprobs",
)  # fmt: skip


@app.command()
def generate(
    target: TargetArgument,
    prompt: Annotated[
        str, typer.Argument(help="Text of the user's message, or the text to continue with --raw.")
    ],
    model: ModelOptions,
    sampling: Annotated[SamplingParams, SAMPLING],
    raw: bool = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a JSON schema that the answer must satisfy (structured output).",
        ),
    ] = None,
    show_tree: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt. Accepted draft tokens are green; the rest is the target's own.

    raw: Continue the text as it is, without the chat template.
    show_tree: Print the draft tree of every round to stderr first.
    """
    if show_tree and as_json:
        raise InputError("--show-tree: trees are text for people, leave out --json")
    if sampling.logprobs is not None and not as_json:
        raise InputError(f"--logprobs {sampling.logprobs}: they are part of the JSON, add --json")
    if json_schema is not None:
        sampling = replace(sampling, json_schema=read_schema(json_schema))
    if not prompt.strip():
        raise InputError("PROMPT is empty: give a text")
    llm = open_llm(target, model)
    if not raw:
        check_template(llm.tokenizer, "--raw continues the text as it is")
    ids = prompt if raw else prompt_ids(llm.tokenizer, [{"role": "user", "content": prompt}])
    run = llm.stream([ids], sampling)
    if as_json:
        for _ in run:
            pass
        typer.echo(json.dumps(summary(run) | {"lookup": llm.drafting.lookup}, ensure_ascii=False))
        check_answered(run)
        return
    show(show_trees(llm, run) if show_tree else run)
    check_answered(run)
    console.print(f"[dim]{last_line(llm, run, model)}[/]")


def read_schema(path: Path) -> str:
    """The text of a file; whether it is a schema is seen later."""
    try:
        return existing_file(path, "--json-schema").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--json-schema {path}: not UTF-8 text, give a JSON file") from error


def show(chunks: Iterable[Chunk]) -> None:
    """Print a stream, accepted draft tokens in green (plain text when not a terminal).

    Not through rich, which would expand tabs and emoji names in what the model said.
    """
    for chunk in chunks:
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
        **acceptance_row(answer.stats),
        "tokens_per_second": round(len(answer.token_ids) / run.seconds, 2),
        "finish_reason": answer.finish_reason,
    }
    if answer.logprobs is not None:
        shown["logprobs"] = [
            {"token": token, "logprob": p, "top": [{"token": t, "logprob": q} for t, q in top]}
            for token, p, top in answer.logprobs
        ]
    return shown


def last_line(llm: LLM, run: Run, model: ModelOptions) -> str:
    """How drafting fared, in one line."""
    result, stats = summary(run), run.completions()[0].stats
    parts = ["no drafting"]
    method = llm.drafting.method
    if method != "none":
        by_default = llm.drafter is None and model.method is None
        parts = [
            f"{method} (no head for this model)" if by_default else method,
            f"{llm.drafting}, {stats.nodes_per_round:.1f} a round",
            f"{mean_length(stats.tokens_per_forward)} tokens a target forward",
        ]
    parts.append(f"{result['output_tokens']} tokens, {result['tokens_per_second']} tok/s")
    return ", ".join(parts)

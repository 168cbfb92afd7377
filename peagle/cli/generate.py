"""`peagle generate` and `peagle chat`: answers that are streamed to the terminal."""

import json
from collections.abc import Callable, Iterable
from contextlib import closing, redirect_stderr
from dataclasses import replace
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli import common
from peagle.cli.options import Fields
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Chunk
from peagle.engine.tree import Draft
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.engine.run import Run

LEGEND = "each line is a node: token, chance that its whole path is accepted, source; ✓ accepted"
ALONE = "no drafts: the target decodes alone"

CHAT_SAMPLING = Fields("temperature", "top_p", "top_k", "min_p", "seed", max_tokens=512)
SAMPLING = Fields(
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "regex", "logprobs",
)  # fmt: skip


def generate(
    target: str,
    prompt: str,
    *,
    model: common.ModelOptions,
    sampling: Annotated[SamplingParams, SAMPLING],
    raw: bool = False,
    json_schema: Path | None = None,
    show_tree: bool = False,
    as_json: common.JsonOption = False,
) -> None:
    """Complete a prompt. Accepted draft tokens are green; the rest is the target's own.

    prompt: Text of the user's message, or the text to continue with --raw.
    raw: Continue the text as it is, without the chat template.
    json_schema: File with a JSON schema that the answer must satisfy (structured output).
    show_tree: Print the draft tree of every round to stderr first.
    """
    from peagle.data.chat import prompt_ids
    from peagle.model.template import check_template

    if show_tree and as_json:
        raise InputError("trees are text for people", field="show_tree", fix="leave out --json")
    if sampling.logprobs is not None and not as_json:
        why = "they are part of the JSON"
        raise InputError(why, field="logprobs", value=sampling.logprobs, fix="add --json")
    if json_schema is not None:
        sampling = replace(sampling, json_schema=read_schema(json_schema))
    if not prompt.strip():
        raise InputError("is empty", field="prompt", fix="give a text")
    llm = common.open_llm(target, model)
    if not raw:
        check_template(llm.tokenizer, "--raw continues the text as it is")
    common.make_engine(llm)
    ids = prompt if raw else prompt_ids(llm.tokenizer, [{"role": "user", "content": prompt}])
    run = llm.stream([ids], sampling)
    if as_json:
        with common.screen.status("answering"):
            for _ in run:
                pass
        typer.echo(json.dumps(summary(run) | {"lookup": llm.drafting.lookup}, ensure_ascii=False))
        _check_answered(run)
        return
    _show_answer(llm, run, model, show_trees(llm, run) if show_tree else run)


def chat(
    target: str, model: common.ModelOptions, sampling: Annotated[SamplingParams, CHAT_SAMPLING]
) -> None:
    """Chat with a model. An empty line or the end of input ends the conversation."""
    from peagle.data.chat import Message, prompt_ids
    from peagle.model.template import check_template

    llm = common.open_llm(target, model)
    check_template(llm.tokenizer)  # before anything is typed
    common.make_engine(llm)
    history: list[Message] = []
    while message := _read():
        history.append({"role": "user", "content": message})
        run = llm.stream([prompt_ids(llm.tokenizer, history)], sampling)
        _show_answer(llm, run, model, run)
        history.append({"role": "assistant", "content": run.completions()[0].text})


def _show_answer(
    llm: "LLM", run: "Run", model: common.ModelOptions, chunks: Iterable[Chunk]
) -> None:
    """Print the answer as it comes, then its last line."""
    show(chunks)
    _check_answered(run)
    common.console.print(f"[dim]{last_line(llm, run, model)}[/]")


def _check_answered(run: "Run") -> None:
    """Raises RequestFailure when the first answer could not go on."""
    answer = run.completions()[0]
    if answer.failure is not None:
        raise RequestFailure(answer.failure)


def _read() -> str:
    try:
        return common.console.input("[bold]> [/]").strip()
    except EOFError:
        return ""


def read_schema(path: Path) -> str:
    """The text of a file. It is parsed as a schema later."""
    try:
        return common.existing_file(path, "json_schema").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fix = "give a JSON file"
        raise InputError("not UTF-8 text", field="json_schema", value=path, fix=fix) from error


def show(chunks: Iterable[Chunk]) -> None:
    """Print a stream, accepted draft tokens in green (plain text when not a terminal). Logs and
    warnings wait for its end: on a terminal they would stand in the middle of a line.

    Not through rich, which would expand tabs and emoji names in the model's text.
    """
    stream = iter(chunks)
    with common.screen.status("reading the prompt"):
        begun = list(islice(stream, 1))
    logged = StringIO()
    try:
        with redirect_stderr(logged):
            for chunk in chain(begun, stream):
                typer.secho(chunk.text, nl=False, fg="green" if chunk.drafted else None)
    finally:
        typer.echo()
        typer.echo(logged.getvalue(), nl=False, err=True)


def summary(run: "Run") -> dict[str, object]:
    """The JSON of `--json`."""
    from peagle.bench.summary import acceptance_row

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


def last_line(llm: "LLM", run: "Run", model: common.ModelOptions) -> str:
    """One line about the drafting of an answer and its speed."""
    result = summary(run)
    stats = run.completions()[0].stats
    parts = ["no drafting"]
    method = llm.drafting.method
    if method != "none":
        by_default = llm.drafter is None and model.method is None
        parts = [
            f"{method} (no head for this model)" if by_default else method,
            f"{llm.drafting}, {stats.nodes_per_round:.1f} a round",
            f"{stats.tokens_per_forward:.2f} tokens a target forward",
        ]
    parts.append(f"{result['output_tokens']} tokens, {result['tokens_per_second']} tok/s")
    return ", ".join(parts)


def show_trees(llm: "LLM", run: "Run") -> list[Chunk]:
    """Decode the one request of `run`, and write the draft tree of every round to stderr. Returns
    what was emitted."""
    chunks = list[Chunk]()
    number = 0
    [request] = run.requests

    def text(tokens: list[int]) -> str:
        return " ".join(json.dumps(llm.tokenizer.decode(t), ensure_ascii=False) for t in tokens)

    typer.echo(ALONE if llm.drafting.method == "none" else LEGEND, err=True)
    with closing(run):
        while request.finish_reason is None:
            known = len(request.tokens)
            draft = request.draft
            chunks += run.step()
            emitted = request.tokens[known:]
            if not emitted or llm.drafting.method == "none":
                continue
            name = f"round {number}" if number else "prompt"
            number += 1
            _write(name, draft, emitted, text)
    return chunks


def _write(name: str, draft: Draft, emitted: list[int], text: Callable[[list[int]], str]) -> None:
    """A line for the round, and one for each node, before its children."""
    accepted = draft.follow(emitted)
    size = len(draft.tokens)
    counts = f"{size} drafted, {len(accepted)} accepted" if size else "no draft"
    rest = emitted[len(accepted) :]
    then = f", then {text(rest)}" if rest else ""
    typer.echo(f"{name}: {counts}{then}", err=True)
    for tail in sorted(draft.tails()[1:]):  # a path comes before all that begin with it
        row = tail[-1]
        mark, colour = ("✓", "green") if row in accepted else ("·", None)
        indent = "  " * (len(tail) - 1)
        token = text([draft.tokens[row - 1]])
        line = f"{mark} {indent}{token}  {draft.chances[row - 1]:.2f}  {draft.source(row)}"
        typer.secho(line, err=True, fg=colour)

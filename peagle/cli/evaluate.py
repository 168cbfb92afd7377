"""`peagle eval`: acceptance length of a head on a file of prompts, and whether it is worth it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peagle.bench.acceptance import measure_acceptance
from peagle.bench.verdict import time_head, verdict
from peagle.cli.common import (
    JsonOption,
    ModelOptions,
    TargetArgument,
    console,
    open_llm,
    progress_bar,
    screen,
)
from peagle.cli.options import App, Fields, parse_list, with_flags
from peagle.data.dataset import read_prompts
from peagle.engine.params import SamplingParams
from peagle.errors import InputError

app = App()
MODEL = Fields("head", "method", "chat_template", "dtype", "device", "quantize", "force")


@app.command("eval")
def evaluate(
    target: TargetArgument,
    *,
    dataset: Annotated[Path, 'JSONL file of {"turns": [...]} or conversations.'],
    k: Annotated[str, "Numbers of draft tokens per round to measure, separated by commas."] = "3,7",
    limit: Annotated[int | None, "Number of records to use. Default: all."] = None,
    model: Annotated[ModelOptions, MODEL],
    sampling: Annotated[SamplingParams, Fields("temperature", max_tokens=512)],
    batch: Annotated[int, "Number of prompts decoded together."] = 8,
    no_timing: Annotated[
        bool, "Do not time the target with and without the head; no verdict is given."
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance length and per-position acceptance, all turns, with the chat template;
    then time a few prompts with and without the head."""
    params = replace(sampling, seed=0)
    conversations = read_prompts(dataset)[:limit]
    depths = parse_list(k, "k", least=1)
    if not conversations:
        raise InputError(f"--limit {limit}: leaves no record of {dataset}")
    llm = open_llm(target, replace(model, k=max(depths)), max_batch=batch)
    if llm.drafter is None:
        raise InputError(f"no head to measure for {target}: name one with --head")
    rows = list[dict[str, Any]]()
    with progress_bar(f"{dataset.stem}") as bar:
        turns = sum(map(len, conversations))
        task = bar.add_task("", total=len(depths) * turns)
        for depth in depths:
            deep = llm.use(llm.drafter, depth)
            row = measure_acceptance(deep, conversations, params, lambda n: bar.advance(task, n))
            rows.append({"dataset": dataset.stem, **row})
    if skipped := rows[0]["skipped_turns"]:
        screen.print(f"[yellow]warning:[/] {skipped} turns left out: longer than the context")
    said = None
    if not no_timing:
        with screen.status("timing the target with and without the head"):
            timings = time_head(llm, rows, conversations, params)
        said = verdict(timings) if timings else None
    if said is not None:
        said["sentence"] = with_flags(said["sentence"])
    if as_json:
        typer.echo(json.dumps({"rows": rows, "verdict": said}, indent=1))
        return
    console.print(_table(rows))
    if said is not None:
        console.print(said["sentence"])


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("dataset", "K", "acceptance length", "per position", "rounds", "output tokens")
    for row in rows:
        table.add_row(
            row["dataset"],
            str(row["k"]),
            f"{row['acceptance_length']:.3f}",
            " ".join(f"{share:.3f}" for share in row["accepted_per_position"]),
            str(row["rounds"]),
            str(row["output_tokens"]),
        )
    return table

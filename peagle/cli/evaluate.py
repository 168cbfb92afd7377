"""`peagle eval`: acceptance length of a head on a file of prompts, and whether it is worth it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.cli.common import (
    JsonOption,
    ModelOptions,
    TargetArgument,
    console,
    open_llm,
    print_table,
    progress_bar,
    screen,
)
from peagle.cli.options import App, Fields, check_at_least, parse_list
from peagle.cli.rows import rows_table
from peagle.engine.params import SamplingParams
from peagle.errors import InputError

app = App()
CHAINS = "3,7"
COLUMNS = (
    "dataset", "drafts", "nodes", "acceptance length", "per position", "tokens / forward",
    "rounds", "output tokens",
)  # fmt: skip
MODEL = Fields(
    "head", "method", "no_lookup", "chat_template", "dtype", "device", "quantize", "force"
)


@app.command("eval")
def evaluate(
    target: TargetArgument,
    *,
    dataset: Path,
    k: str | None = None,
    nodes: str | None = None,
    limit: int | None = None,
    model: Annotated[ModelOptions, MODEL],
    sampling: Annotated[SamplingParams, Fields("temperature", max_tokens=512)],
    batch: int = 8,
    no_timing: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance length and per-position acceptance, all turns, with the chat template;
    then time a few prompts with and without the head.

    dataset: JSONL or Parquet file of {"turns": [...]} or conversations.
    k: Numbers of draft tokens per round to measure, separated by commas. Default: 3,7; none where
        --nodes is given.
    nodes: The same of draft trees, with lookup unless --no-lookup is given.
    limit: Number of records to use. Default: all.
    batch: Number of prompts decoded together.
    no_timing: Do not time the target with and without the head; no verdict is given.
    """
    from peagle.bench.native import measure_acceptance
    from peagle.bench.verdict import time_head, verdict
    from peagle.data.dataset import read_prompts

    check_at_least(1, limit=limit)
    params = replace(sampling, seed=0)
    conversations = read_prompts(dataset)[:limit]
    chains = parse_list(k or CHAINS, "k", int, 1) if k or not nodes else ()
    trees = parse_list(nodes, "nodes", int, 1) if nodes else ()
    llm = open_llm(target, model, max_batch=batch)
    if llm.drafter is None and not (llm.drafting.lookup and trees):
        fix = "name one, or give `nodes` to measure lookup"
        raise InputError(f"{target} has none to measure", field="head", fix=fix)
    used = [llm.use(llm.drafter, depth) for depth in chains if llm.drafter]
    used += [llm.use(llm.drafter, nodes=size, lookup=llm.drafting.lookup) for size in trees]
    rows = list[dict[str, Any]]()
    with progress_bar("turns", "answered") as bar:
        turns = sum(map(len, conversations))
        task = bar.add_task("", total=len(used) * turns)
        for one in used:
            row = measure_acceptance(one, conversations, params, lambda n: bar.advance(task, n))
            rows.append({"dataset": dataset.stem, **row})
    if skipped := rows[0]["skipped_turns"]:
        screen.print(f"[yellow]warning:[/] {skipped} turns left out: longer than the context")
    judged = None
    if not no_timing:
        with screen.status("timing the target with and without the head"):
            timings = time_head(llm, rows, conversations, params)
        judged = verdict(timings) if timings else None
    if as_json:
        typer.echo(json.dumps({"rows": rows, "verdict": judged}, indent=1))
        return
    print_table(rows_table(rows, *COLUMNS))
    if judged is not None:
        console.print(judged["sentence"])

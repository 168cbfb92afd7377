"""`peagle eval`: acceptance length of a head on a file of prompts, and whether it is worth it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peagle.bench.acceptance import measure_acceptance
from peagle.bench.verdict import time_head, verdict
from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    HeadOption,
    JsonOption,
    MaxTokensOption,
    MethodOption,
    QuantizeOption,
    TargetArgument,
    TemperatureOption,
    open_llm,
    parse_list,
    progress_bar,
    screen,
)
from peagle.cli.generate import console
from peagle.data.dataset import read_prompts
from peagle.engine.params import SamplingParams
from peagle.errors import InputError

app = typer.Typer(add_completion=False)


@app.command("eval")
def evaluate(
    target: TargetArgument,
    dataset: Annotated[Path, typer.Option(help='JSONL file of {"turns": [...]} or conversations.')],
    head: HeadOption = None,
    method: MethodOption = None,
    k: Annotated[
        str, typer.Option(help="Numbers of draft tokens per round to measure, separated by commas.")
    ] = "3,7",
    limit: Annotated[
        int | None, typer.Option(help="Number of records to use. Default: all.")
    ] = None,
    chat_template: ChatTemplateOption = None,
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = 512,
    batch: Annotated[int, typer.Option(help="Number of prompts decoded together.")] = 8,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    force: ForceOption = False,
    no_timing: Annotated[
        bool,
        typer.Option(
            "--no-timing",
            help="Do not time the target with and without the head; no verdict is given.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance length and per-position acceptance, all turns, with the chat template;
    then time a few prompts with and without the head."""
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens)
    conversations, depths = read_prompts(dataset)[:limit], parse_list(k, "--k", least=1)
    if not conversations:
        raise InputError(f"--limit {limit}: leaves no record of {dataset}")
    llm = open_llm(
        target,
        head,
        method,
        max(depths),
        dtype=dtype,
        device=device,
        quantize=quantize,
        force=force,
        chat_template=chat_template,
        max_batch=batch,
    )
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
    timings = []
    if not no_timing:
        with screen.status("timing the target with and without the head"):
            timings = time_head(llm, rows, conversations, params)
    said = verdict(timings) if timings else None
    if as_json:
        typer.echo(json.dumps({"rows": rows, "verdict": said}, indent=1))
        return
    table = Table("dataset", "K", "acceptance length", "per position", "rounds", "output tokens")
    for row in rows:
        shares = " ".join(f"{share:.3f}" for share in row["accepted_per_position"])
        length = f"{row['acceptance_length']:.3f}"
        table.add_row(
            row["dataset"],
            str(row["k"]),
            length,
            shares,
            str(row["rounds"]),
            str(row["output_tokens"]),
        )
    console.print(table)
    if said is not None:
        console.print(said["sentence"])

"""`peagle plan`: what training a head will take."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from peagle.cli.common import JsonOption, TargetArgument
from peagle.cli.generate import console
from peagle.errors import InputError

app = typer.Typer(add_completion=False)


@app.command()
def plan(  # noqa: PLR0917
    target: TargetArgument,
    tokens: Annotated[int, typer.Option(help="Number of answer tokens to train on.")],
    context: Annotated[int, typer.Option(help="Length of a training sequence in tokens.")],
    answered: Annotated[
        float,
        typer.Option(
            help="Fraction of the tokens that belong to answers (0 to 1), as `peagle data show` "
            "counts it."
        ),
    ] = 1.0,
    gpus: Annotated[int, typer.Option(help="Number of GPUs to train on; 0 trains on the CPU.")] = 0,
    memory: Annotated[
        float | None,
        typer.Option(help="Memory of one device in GiB. Default: this machine's, or 80 for a GPU."),
    ] = None,
    segments: Annotated[
        int | None,
        typer.Option(
            help="Number of passes that a sequence is partitioned into. Default: the fewest that "
            "fit in memory."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Drafting method to train: p-eagle or eagle3.")
    ] = "p-eagle",
    layers: Annotated[
        int | None,
        typer.Option(help="Number of decoder layers of the head. Default: 4, or 1 for eagle3."),
    ] = None,
    depths: Annotated[
        int, typer.Option(help="Number of draft tokens per round to train for (K).")
    ] = 8,
    draft_vocab: Annotated[
        int, typer.Option(help="Size of the draft vocabulary, the most frequent tokens.")
    ] = 8192,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Output folder of a short run with these settings, whose throughput gives the "
            "hours. Default: hours are not estimated."
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            help="Price of one device for one hour, in any currency. Default: no cost is estimated."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of training by part; only the target's configuration is downloaded."""
    from peagle.methods.spec import HeadSpec
    from peagle.tools.plan import GIB, measured_rate, outline
    from peagle.tools.plan import plan as make_plan

    limits = {"tokens": (tokens, 1), "context": (context, 4), "gpus": (gpus, 0)}
    for name, (value, least) in limits.items():
        if value < least:
            raise InputError(f"--{name} {value}: must be at least {least}")
    if not 0 < answered <= 1:
        raise InputError(f"--answered {answered}: must be above 0, at most 1")
    spec = HeadSpec(method, layers or (1 if method == "eagle3" else 4), depths, draft_vocab)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    room = memory or (80.0 if gpus else machine)
    rate = None if run is None else measured_rate(run)
    made = make_plan(
        outline(target), spec, tokens=tokens, context=context, segments=segments, room=room * GIB,
        device="cuda" if gpus else "cpu", answered=answered, processes=max(gpus, 1), rate=rate,
    )  # fmt: skip
    cost = None if made.hours is None or price is None else made.hours * price * max(gpus, 1)
    if as_json:
        report = {
            "memory_bytes": made.memory, "total_bytes": made.total, "device_bytes": int(room * GIB),
            "segments": made.segments, "captured_bytes": made.captured, "hours": made.hours,
            "cost": cost,
        }  # fmt: skip
        typer.echo(json.dumps(report, indent=1))
        return
    table = Table("memory of one process", "GiB")
    for part, size in made.memory.items():
        table.add_row(part, f"{size / GIB:.2f}")
    table.add_row("together", f"{made.total / GIB:.2f} of {room:.1f}", style="bold")
    console.print(table)
    console.print(f"segments: {made.segments} for sequences of {context} tokens")
    if made.total > room * GIB:
        console.print("[yellow]does not fit:[/] shorter sequences, fewer layers or more memory")
    console.print(f"disk, should features be captured (bf16): {made.captured / GIB:.1f} GiB")
    if made.hours is None:
        console.print("hours: name a short run like it with --run (peagle train --steps 20)")
    else:
        money = "" if cost is None else f", {cost:.2f} at {price} an hour and device"
        console.print(f"hours: {made.hours:.1f}{money}")

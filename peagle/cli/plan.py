"""`peagle plan`: what training a head will take."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from peagle.cli.common import JsonOption, TargetArgument, console
from peagle.cli.options import App, Fields, check_at_least
from peagle.errors import InputError
from peagle.methods.spec import HeadSpec

app = App()


@app.command()
def plan(
    target: TargetArgument,
    *,
    tokens: Annotated[int, "Number of answer tokens to train on."],
    context: Annotated[int, "Length of a training sequence in tokens."],
    answered: Annotated[
        float,
        "Fraction of the tokens that belong to answers (0 to 1), as `peagle data show` counts it.",
    ] = 1.0,
    gpus: Annotated[int, "Number of GPUs to train on; 0 trains on the CPU."] = 0,
    memory: Annotated[
        float | None, "Memory of one device in GiB. Default: this machine's, or 80 for a GPU."
    ] = None,
    segments: Annotated[
        int | None,
        "Number of passes that a sequence is partitioned into. Default: the fewest that fit in "
        "memory.",
    ] = None,
    head: Annotated[HeadSpec, Fields("method", "layers", "depths", "draft_vocab")],
    run: Annotated[
        Path | None,
        "Output folder of a short run with these settings, whose throughput gives the hours. "
        "Default: hours are not estimated.",
    ] = None,
    price: Annotated[
        float | None,
        "Price of one device for one hour, in any currency. Default: no cost is estimated.",
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of training by part; only the target's configuration is downloaded."""
    from peagle.tools.plan import GIB, measured_rate, outline
    from peagle.tools.plan import plan as make_plan

    check_at_least(0, gpus=gpus)
    check_at_least(1, tokens=tokens)
    check_at_least(4, context=context)
    if not 0 < answered <= 1:
        raise InputError(f"--answered {answered}: must be above 0, at most 1")
    spec = head
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

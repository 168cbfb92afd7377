"""`peagle plan`: what training a head will take."""

import json
from typing import Annotated

import typer
from rich.table import Table

from peagle.cli.common import JsonOption, console
from peagle.cli.options import Fields
from peagle.tools.plan import GIB, Training
from peagle.tools.plan import plan as make_plan
from peagle.train.spec import HeadSpec


def plan(
    target: str,
    *,
    training: Training,
    head: Annotated[HeadSpec, Fields("method", "layers", "depths", "draft_vocab")],
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of training by part; only the target's configuration is downloaded."""
    made = make_plan(target, head, training)
    if as_json:
        report = {
            "memory_bytes": made.memory, "total_bytes": made.total, "device_bytes": training.room,
            "segments": made.segments, "captured_bytes": made.captured, "hours": made.hours,
            "cost": made.cost,
        }  # fmt: skip
        typer.echo(json.dumps(report, indent=1))
        return
    table = Table("memory of one process", "GiB")
    for part, size in made.memory.items():
        table.add_row(part, f"{size / GIB:.2f}")
    table.add_row("together", f"{made.total / GIB:.2f} of {training.room / GIB:.1f}", style="bold")
    console.print(table)
    console.print(f"segments: {made.segments} for sequences of {training.context} tokens")
    if made.total > training.room:
        console.print("[yellow]does not fit:[/] shorter sequences, fewer layers or more memory")
    console.print(f"disk, should features be captured (bf16): {made.captured / GIB:.1f} GiB")
    if made.hours is None:
        console.print("hours: name a short run like it with --run (peagle train --steps 20)")
    else:
        money = ""
        if made.cost is not None:
            money = f", {made.cost:.2f} at {training.price} an hour and device"
        console.print(f"hours: {made.hours:.1f}{money}, without measurements and checkpoints")

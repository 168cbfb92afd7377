"""`peagle plan`: what training a head will take."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from peagle.cli.common import JsonOption, console
from peagle.cli.options import Fields
from peagle.errors import InputError, check_at_least
from peagle.train.spec import HeadSpec


@dataclass(frozen=True, slots=True)
class Training:
    """Options of the planned training.

    tokens: Number of answer tokens to train on.
    context: Length of a training sequence in tokens.
    answered: Fraction of the tokens that belong to answers (0 to 1), as `peagle data show` counts
        it.
    gpus: Number of GPUs to train on; 0 trains on the CPU.
    memory: Memory of one device in GiB. Default: this machine's, or 80 for a GPU.
    segments: Number of passes that a sequence is partitioned into. Default: the fewest that fit in
        memory.
    run: Output folder of a short run with these settings, whose throughput gives the hours.
        Default: hours are not estimated.
    price: Price of one device for one hour, in any currency. Default: no cost is estimated.
    """

    tokens: int
    context: int
    answered: float = 1.0
    gpus: int = 0
    memory: float | None = None
    segments: int | None = None
    run: Path | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        check_at_least(0, gpus=self.gpus)
        check_at_least(1, tokens=self.tokens)
        check_at_least(4, context=self.context)
        if not 0 < self.answered <= 1:
            why = "must be above 0, at most 1"
            raise InputError(why, field="answered", value=self.answered)


def plan(
    target: str,
    *,
    training: Training,
    head: Annotated[HeadSpec, Fields("method", "layers", "depths", "draft_vocab")],
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of training by part; only the target's configuration is downloaded."""
    from peagle.model.partial import outline
    from peagle.tools.plan import GIB, measured_rate
    from peagle.tools.plan import plan as make_plan

    gpus = training.gpus
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    room = training.memory or (80.0 if gpus else machine)
    rate = None if training.run is None else measured_rate(training.run)
    made = make_plan(
        outline(target), head, tokens=training.tokens, context=training.context,
        segments=training.segments, room=room * GIB, device="cuda" if gpus else "cpu",
        answered=training.answered, processes=max(gpus, 1), rate=rate,
    )  # fmt: skip
    cost = None
    if made.hours is not None and training.price is not None:
        cost = made.hours * training.price * max(gpus, 1)
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
    console.print(f"segments: {made.segments} for sequences of {training.context} tokens")
    if made.total > room * GIB:
        console.print("[yellow]does not fit:[/] shorter sequences, fewer layers or more memory")
    console.print(f"disk, should features be captured (bf16): {made.captured / GIB:.1f} GiB")
    if made.hours is None:
        console.print("hours: name a short run like it with --run (peagle train --steps 20)")
    else:
        money = "" if cost is None else f", {cost:.2f} at {training.price} an hour and device"
        console.print(f"hours: {made.hours:.1f}{money}")

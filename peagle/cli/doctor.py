"""`peagle doctor`: does a head fit its target, and is it served as it was trained?"""

import json

import typer
from rich.table import Table
from rich.text import Text

from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    ForceOption,
    HeadArgument,
    JsonOption,
    TargetArgument,
    open_target,
    screen,
)
from peagle.cli.generate import console
from peagle.cli.options import App, with_flags
from peagle.heads.find import head_folder
from peagle.shown import model_name

app = App()
COLOURS = {"ok": "green", "wrong": "red", "warning": "yellow", "forced": "yellow", "skipped": "dim"}


@app.command()
def doctor(
    head: HeadArgument,
    target: TargetArgument,
    prompt: str | None = None,
    chat_template: ChatTemplateOption = None,
    dtype: str = "float32",
    device: DeviceOption = "auto",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a head with its target: files, layers, mask token, features, logits, and what the
    target accepts in a few short answers. Exit code 1: it does not fit.

    prompt: Text on which features and logits are compared. Default: a short one.
    dtype: Data type of the weights; float32 shows errors that bfloat16 hides.
    """
    from peagle.tools.doctor import PROMPT, examine, verdict

    head_folder(head)  # before the target takes its time to load
    with screen.status(f"loading {model_name(target)}"):
        model = open_target(target, chat_template, dtype=dtype, device=device)
    with screen.status(f"examining {head}"):
        checks = examine(head, model, prompt=prompt or PROMPT, force=force)
    checks = [
        check._replace(found=with_flags(check.found), fix=with_flags(check.fix)) for check in checks
    ]
    states = {check.state for check in checks}
    unfit = "wrong" in states
    if as_json:
        rows = [check._asdict() for check in checks]
        typer.echo(json.dumps({"healthy": not unfit, "verdict": verdict(checks), "checks": rows}))
    else:
        table = Table("check", "state", "what was found")
        for check in checks:
            table.add_row(check.name, Text(check.state, COLOURS[check.state]), Text(check.found))
        console.print(table)
        worst = next(state for state in ("wrong", "warning", "ok") if state in states)
        console.print(verdict(checks), style=COLOURS[worst], markup=False)
    if unfit:
        raise typer.Exit(1)

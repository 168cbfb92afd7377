"""`peagle doctor` and `peagle export`: check a head, and write it in another format."""

import json
from pathlib import Path
from typing import Literal

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
    console,
    open_target,
    screen,
)
from peagle.cli.options import App, with_flags
from peagle.errors import InputError
from peagle.files import check_folder, writing
from peagle.shown import model_name

doctor_app = App()
export_app = App()
COLOURS = {"ok": "green", "wrong": "red", "warning": "yellow", "forced": "yellow", "skipped": "dim"}


@doctor_app.command()
def doctor(
    head: HeadArgument,
    target: TargetArgument,
    *,
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
    from peagle.heads.folder import head_folder
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


@export_app.command()
def export(
    head: HeadArgument,
    output: Path,
    *,
    to: Literal["vllm", "speculators"],
    target: str | None = None,
    chat_template: ChatTemplateOption = None,
    force: ForceOption = False,
) -> None:
    """Write a head in a format that vLLM serves, with the target's embedding where needed.

    output: New folder to write the head to.
    to: Checkpoint format to write: vllm or speculators.
    target: Target model of the head. Default: the one it was trained for.
    """
    from peagle.heads.folder import head_folder
    from peagle.heads.format import read_keys
    from peagle.heads.load import load_drafter
    from peagle.heads.save import save_drafter
    from peagle.tools.card import write_card

    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        fix = "name a new one"
        raise InputError("is not an empty folder", field="output", value=output, fix=fix)
    name = target or read_keys(head_folder(head)).trained.target
    if not name:
        why = "its config does not name the target it was trained for"
        raise InputError(why, field="head", value=Path(head), fix="name it with `target`")
    check_folder(output)
    drafter = load_drafter(head, open_target(name, chat_template), force=force)
    with writing(output):
        save_drafter(drafter, output, to, dtype=None)
        write_card(output)
    screen.print(f"wrote {output} ({to})")

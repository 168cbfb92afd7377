"""`peagle catalog`, `doctor` and `export`: models known by name, and heads checked and exported."""

import json
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

import typer
import yaml
from rich.table import Table
from rich.text import Text

from peagle.catalog import find_name, how_to_get, load_catalog, model_name, record
from peagle.cli import common
from peagle.cli.options import App, refuse_idle, with_flags
from peagle.errors import InputError
from peagle.files import writing

catalog_app = App()
COLOURS = {"ok": "green", "wrong": "red", "warning": "yellow", "forced": "yellow", "skipped": "dim"}


@catalog_app.callback(invoke_without_command=True)
def catalog(context: typer.Context, as_json: common.JsonOption = False) -> None:
    """List the models known by name and the heads made for them."""
    if context.invoked_subcommand is not None:
        return
    entries = load_catalog()
    if as_json:
        typer.echo(json.dumps([record(name, entry) for name, entry in entries.items()]))
        return
    table = Table()
    for column in ("name", "target", "head", "K", "acceptance length", "run"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for name, entry in entries.items():
        run = "yes" if entry.verified else "no"
        target = entry.target if isinstance(entry.target, str) else entry.target.package
        for number, (method, head) in enumerate(entry.heads.items()):
            first = (name, target) if number == 0 else ("", "")
            best = [row for row in head.acceptance if row.k == head.k][:2]
            lengths = ", ".join(f"{row.dataset} {row.length:.2f}" for row in best)
            who = f"{method}: {head.hub or (head.folder and head.folder.name)}"
            table.add_row(*map(Text, (*first, who, str(head.k), lengths, run)))
        if not entry.heads:
            table.add_row(*map(Text, (name, target, "none yet", "", "", run)))
    common.print_table(table)


@catalog_app.command()
def show(name: str, *, as_json: common.JsonOption = False) -> None:
    """Everything recorded of one model.

    name: Name of the model: a catalog name or a hub id.
    """
    name = find_name(name)
    entry = load_catalog()[name]
    recorded = record(name, entry)
    if as_json:
        typer.echo(json.dumps(recorded))
        return
    shown = {recorded.pop("name"): _filled(recorded)}
    typer.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100), nl=False)
    for method, head in entry.heads.items():
        if head.location is None:
            typer.echo(f"The {method} head is not here: {how_to_get(head)}")


def _filled(value: Any) -> Any:
    """A record without what is unknown or empty."""
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in value.items() if each not in (None, (), {})}
    return list(map(_filled, value)) if isinstance(value, tuple) else value


def doctor(
    context: typer.Context,
    head: str,
    target: str | None = None,
    *,
    chat_template: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    force: bool = False,
    as_json: common.JsonOption = False,
) -> None:
    """Check a head with its target: files, layers, mask token, features, logits, and what the
    target accepts in a few short answers. Exit code 1: it does not fit. With a model's name alone:
    how it runs here, how fast, its known heads, and what a new one takes.

    target: Target model: a folder, a hub id, a .gguf file or a catalog name.
    dtype: Data type of the weights; float32 shows errors that bfloat16 hides.
    """
    from peagle.heads.format import head_folder
    from peagle.tools.doctor import examine, verdict

    if target is None:
        refuse_idle(context, ("chat_template", "dtype", "force"), "without a target")
        _show_outlook(head, device, as_json)
        return
    head_folder(head)  # before the target takes its time to load
    with common.screen.status(f"loading {model_name(target)}"):
        model = common.open_target(target, chat_template, dtype=dtype, device=device)
    with common.screen.status(f"examining {head}"):
        checks = examine(head, model, force=force)
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
        common.console.print(table)
        worst = next(state for state in ("wrong", "warning", "ok") if state in states)
        common.console.print(verdict(checks), style=COLOURS[worst], markup=False)
    if unfit:
        raise typer.Exit(1)


def _show_outlook(name: str, device: str, as_json: bool) -> None:
    """Print what is known of a model before it runs."""
    from peagle.model.loader import resolve_device
    from peagle.tools.outlook import catalogued, outlook

    config = Path(expanduser(name), "config.json")
    if config.is_file() and "draft_vocab_size" in config.read_text(errors="replace"):
        fix = "name its target after it"
        raise InputError("is a head", field="head", value=Path(name), fix=fix)
    place = resolve_device(device)
    facts = catalogued(name)
    try:
        with common.screen.status(f"looking at {model_name(name)}"):
            facts = outlook(name, place)
    finally:  # where it fails, as without the hub, the catalog's facts stay
        if as_json:
            typer.echo(json.dumps(facts))
        elif facts:
            table = Table("fact", model_name(name))
            for row in facts.items():
                table.add_row(*map(Text, row))
            common.print_table(table)


def export(
    head: str,
    output: Path,
    *,
    to: Literal["vllm", "speculators"],
    target: str | None = None,
    chat_template: str | None = None,
    force: bool = False,
) -> None:
    """Write a head in a format that vLLM serves, with the target's embedding where needed.

    output: New folder to write the head to.
    to: Checkpoint format to write: vllm or speculators.
    target: Target model of the head. Default: the one it was trained for.
    """
    from peagle.heads.format import head_folder, read_keys
    from peagle.heads.load import load_drafter
    from peagle.heads.save import save_drafter
    from peagle.tools.card import write_card

    if output.exists():
        raise InputError("exists already", field="output", value=output, fix="name a new one")
    name = target or read_keys(head_folder(head)).trained.target
    if not name:
        why = "its config does not name the target it was trained for"
        raise InputError(why, field="head", value=Path(head), fix="name it with `target`")
    common.check_folder(output)
    drafter = load_drafter(head, common.open_target(name, chat_template, unrun=1), force=force)
    with writing(output):
        save_drafter(drafter, output, to, dtype=None)
        write_card(output)
    common.screen.print(f"wrote {output} ({to})")

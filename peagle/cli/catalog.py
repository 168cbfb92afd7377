"""`peagle catalog`: models known by name, their heads, and how well these draft."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from peagle.catalog import find_name, how_to_get, load_catalog, record
from peagle.cli.common import JsonOption, print_table
from peagle.cli.options import App
from peagle.shown import mean_length

app = App()
CatalogOption = Annotated[
    Path | None,
    typer.Option(
        "--catalog",
        metavar="FILE",
        help="YAML file with entries of your own. Default: $PEAGLE_CATALOG.",
    ),
]


@app.callback(invoke_without_command=True)
def catalog(
    context: typer.Context, file: CatalogOption = None, as_json: JsonOption = False
) -> None:
    """List the models known by name and the heads made for them."""
    if context.invoked_subcommand is not None:
        context.obj = file, as_json
        return
    entries = load_catalog(file)
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
            lengths = ", ".join(f"{row.dataset} {mean_length(row.length)}" for row in best)
            who = f"{method}: {head.hub or (head.folder and head.folder.name)}"
            table.add_row(*map(Text, (*first, who, str(head.k), lengths, run)))
        if not entry.heads:
            table.add_row(*map(Text, (name, target, "none yet", "", "", run)))
    print_table(table)


@app.command()
def show(
    context: typer.Context,
    name: str,
    file: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Everything recorded of one model.

    name: Name of the model: a catalog name or a hub id.
    """
    file_before, json_before = context.obj
    name = find_name(name, file or file_before)
    entry = load_catalog(file or file_before)[name]
    recorded = record(name, entry)
    if as_json or json_before:
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

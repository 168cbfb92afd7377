"""`peagle catalog`: models known by name, their heads, and how well these draft."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle.catalog import CatalogHead, find_name, load_catalog, record
from peagle.catalog_fields import VllmFlags
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
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


@app.callback(invoke_without_command=True)
def catalog(context: typer.Context, file: CatalogOption = None, as_json: Json = False) -> None:
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
    Console(highlight=False).print(table)


@app.command()
def show(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help="Name of the model: a catalog name or a hub id.", show_default=False),
    ],
    file: CatalogOption = None,
    as_json: Json = False,
) -> None:
    """Everything recorded of one model."""
    file_before, json_before = context.obj
    name = find_name(name, file or file_before)
    entry = load_catalog(file or file_before)[name]
    if as_json or json_before:
        typer.echo(json.dumps(record(name, entry)))
        return
    typer.echo(f"{name}: {entry.target_name}")
    facts = {
        "licence": entry.licence,
        "run by this project": "yes" if entry.verified else "no",
        "least vLLM": entry.min_vllm,
        "hardware": entry.hardware,
        "GPU memory": f"{entry.gpu_memory} GiB" if entry.gpu_memory else None,
        "vLLM flags": _words(entry.vllm_flags),
        **{f"profile {each}": _words(flags) for each, flags in entry.profiles.items()},
        "note": entry.note,
    }
    for what, value in facts.items():
        if value:
            typer.echo(f"  {what}: {value}")
    for method, head in entry.heads.items():
        here = head.location or f"{head.folder} (not here: heads are in the repository)"
        typer.echo(f"  {method} head: {here}, K = {head.k}, licence {head.licence or 'unknown'}")
        known: dict[str, object] = {
            "trained for draft tokens": head.depths,
            "feature layers": ", ".join(map(str, head.layers)),
            "vLLM": _versions(head),
            "note": head.note,
            "other heads": ", ".join(head.others),
            "source": head.source,
        }
        for what, each in known.items():
            if each:
                typer.echo(f"    {what}: {each}")
        for row in head.acceptance:
            what = f"{row.dataset}, K = {row.k}: {mean_length(row.length)}"
            typer.echo(f"    acceptance length, {what} ({row.source})")


def _versions(head: CatalogHead) -> str:
    since = f"{head.min_vllm} or newer" if head.min_vllm else ""
    below = f"before {head.below_vllm}" if head.below_vllm else ""
    return ", ".join(filter(None, (since, below)))


def _words(flags: VllmFlags) -> str:
    return " ".join(f"{flag}={value}" for flag, value in flags.items())

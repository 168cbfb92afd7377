"""The `peagle` command."""

import sys
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperGroup

from peagle import __version__
from peagle.config import InputError

# command → (module, function, one line of help); modules are imported when their command runs, so
# that `peagle --version` and `--help` do not wait for torch.
COMMANDS = {
    "demo": "peagle.cli.demo",
    "generate": "peagle.cli.generate",
    "chat": "peagle.cli.chat",
    "eval": "peagle.cli.evaluate",
    "train": "peagle.cli.train",
    "data": "peagle.cli.data",
    "export": "peagle.cli.export",
}


class _LazyGroup(TyperGroup):
    """Imports a command's module when it is asked for."""

    def list_commands(self, ctx):  # type: ignore[no-untyped-def]
        return list(COMMANDS)

    def get_command(self, ctx, cmd_name):  # type: ignore[no-untyped-def]
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return typer.main.get_command(import_module(COMMANDS[cmd_name]).app)


app = typer.Typer(cls=_LazyGroup, add_completion=False, no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peagle {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """P-EAGLE speculative decoding: train, measure and run parallel-drafting heads."""


def main() -> None:
    """Entry point. Bad input is one line and exit code 2."""
    try:
        app()
    except InputError as error:
        print(f"peagle: {error}", file=sys.stderr)
        sys.exit(2)

"""The `peagle` command."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from peagle import __version__
from peagle.catalog import did_you_mean
from peagle.cli.options import INTERRUPTED, App
from peagle.engine.params import RequestFailure
from peagle.errors import InputError, InputWarning

# command → (module:function or module:group below peagle.cli, panel of --help, help). A module is
# imported when its command runs, so that `peagle --version` and `--help` do not wait for torch.
COMMANDS = {
    "demo": ("measure:demo", "Run", "Decode prompts alone, with EAGLE-3 and with P-EAGLE."),
    "generate": ("generate:generate", "Run", "Complete a prompt, streaming."),
    "chat": ("generate:chat", "Run", "Chat with a model in the terminal."),
    "serve": ("serve:serve", "Run", "Serve a model by OpenAI's API, with a console."),
    "catalog": ("models:catalog_app", "Run", "List the models known by name, and their heads."),
    "eval": ("measure:evaluate", "Measure", "Measure a head's acceptance length on your prompts."),
    "bench": ("bench:app", "Measure", "Measure throughput, latency and acceptance under load."),
    "doctor": ("models:doctor", "Measure", "Check a head, or how a model runs here."),
    "train": ("train:train", "Train", "Train a draft head for a model."),
    "data": ("data:app", "Train", "Make training data, and inspect it."),
    "plan": ("plan:plan", "Train", "Estimate memory, disk and hours of training a head."),
    "deploy": ("deploy:app", "Deploy", "Serve a model here, on Kubernetes or on SageMaker."),
    "export": ("models:export", "Deploy", "Write a head for vLLM or for speculators."),
}


def load_command(name: str) -> Any:
    """Import a command's module, and build the click command."""
    group = found = resolve_name(f"peagle.cli.{COMMANDS[name][0]}")
    if not isinstance(found, App):
        group = App()
        group.command(name)(found)  # a group of one command is that command
    return typer.main.get_command(group)


def first_screen() -> str:
    """The text that `peagle` without a command prints: the commands that most people need first."""
    return Path(__file__).with_name("first_screen.txt").read_text()


class _LazyGroup(TyperGroup):
    """Imports a command's module when the command is run; `--help` lists stand-ins."""

    def list_commands(self, ctx):  # type: ignore[no-untyped-def]
        return list(COMMANDS)

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if not args and not ctx.resilient_parsing:
            typer.echo(first_screen(), nl=False)
            ctx.exit()
        return super().parse_args(ctx, args)

    def invoke(self, ctx):  # type: ignore[no-untyped-def]
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort) as stop:  # the latter: at a question
            typer.echo(": ".join(["stopped", *map(str, stop.args)]), err=True)
            raise typer.Exit(INTERRUPTED) from stop

    def get_command(self, ctx, cmd_name):  # type: ignore[no-untyped-def]
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        _, panel, text = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=text, rich_help_panel=panel)

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        if args[0] not in COMMANDS:
            fix = did_you_mean(args[0], COMMANDS) or "peagle --help lists all"
            raise InputError("no such command", field="command", value=args[0], fix=fix)
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


app = typer.Typer(cls=_LazyGroup)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peagle {__version__}")
        raise typer.Exit


VERSION = typer.Option(
    "--version", callback=_version, is_eager=True, help="Print the version and exit."
)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print each InputWarning once, as one line on stderr; other warnings as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", InputWarning)
        # torch's, of bf16 rows under float32 norms, as autocast has them in training.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if not issubclass(category, InputWarning):
                show_others(message, category, *where)
                return
            from peagle.cli.common import warn

            warn(str(message))

        warnings.showwarning = show  # type: ignore[assignment]
        yield


@app.callback()
def root(context: typer.Context, version: Annotated[bool, VERSION] = False) -> None:
    """P-EAGLE speculative decoding: run, measure and train parallel-drafting heads."""
    context.with_resource(_warnings_in_a_line())


def in_a_line(error: Exception) -> str:
    """The line of an error; an OSError names its file and the fix."""
    from peagle.files import cache_fix, unusable

    text = str(unusable(error) if isinstance(error, OSError) else error)
    fix = cache_fix(text) if isinstance(error.__cause__, OSError) else ""
    return text if fix in text else f"{text}; {fix}"


def main() -> None:
    """Entry point. Bad input, or a file that cannot be used, is one line and exit code
    2; a request that fails is one and code 1. Characters that cannot be read or shown are
    replaced."""
    for stream in (sys.stdin, sys.stdout):  # stderr never refuses
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (InputError, OSError, RequestFailure) as error:
        print(f"peagle: {in_a_line(error)}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RequestFailure) else 2)

"""The `peagle` command."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from peagle import __version__
from peagle.config import InputError, InputWarning
from peagle.engine.request import RequestFailure

# command → (module, what `peagle --help` says); modules are imported when their command runs, so
# that `peagle --version` and `--help` do not wait for torch.
COMMANDS = {
    "demo": ("peagle.cli.demo", "The demo target alone, with EAGLE-3 and with P-EAGLE."),
    "generate": ("peagle.cli.generate", "Complete a prompt, streaming."),
    "chat": ("peagle.cli.chat", "Talk to a target."),
    "serve": ("peagle.cli.serve", "Serve a target by OpenAI's API."),
    "eval": ("peagle.cli.evaluate", "Measure the acceptance of a head on a file of prompts."),
    "bench": ("peagle.cli.bench", "Throughput, latency and acceptance under load."),
    "train": ("peagle.cli.train", "Train a head for a target."),
    "data": ("peagle.cli.data", "Make training data."),
    "plan": ("peagle.cli.plan", "Memory, disk and hours that training a head will take."),
    "export": ("peagle.cli.export", "Write a head for vLLM or in the speculators dialect."),
    "doctor": ("peagle.cli.doctor", "Check a head beside its target; name what differs."),
    "catalog": ("peagle.cli.catalog", "Models known by name, and the heads made for them."),
    "deploy": ("peagle.cli.deploy", "Serve a model here, on Kubernetes or on SageMaker."),
    "push": ("peagle.cli.push", "Upload a head to the Hugging Face hub."),
}


class _LazyGroup(TyperGroup):
    """Imports a command's module when the command is run; `--help` lists stand-ins."""

    def list_commands(self, ctx):  # type: ignore[no-untyped-def]
        return list(COMMANDS)

    def get_command(self, ctx, cmd_name):  # type: ignore[no-untyped-def]
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        name, _, rest = super().resolve_command(ctx, args)
        module = import_module(COMMANDS[str(name)][0])
        return name, typer.main.get_command(module.app), rest


app = typer.Typer(cls=_LazyGroup, add_completion=False, no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peagle {__version__}")
        raise typer.Exit


@contextmanager
def _our_warnings_in_a_line() -> Iterator[None]:
    """Each of our own warnings once, as one line on stderr; others as Python shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", InputWarning)
        # torch's, of bf16 rows under float32 norms, as autocast has them in training.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if not issubclass(category, InputWarning):
                show_others(message, category, *where)
                return
            from rich.text import Text

            from peagle.cli.common import screen

            screen.print("[yellow]warning:[/]", Text(str(message)))

        warnings.showwarning = show  # type: ignore[assignment]
        yield


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """P-EAGLE speculative decoding: train, measure and run parallel-drafting heads."""
    context.with_resource(_our_warnings_in_a_line())


def main() -> None:
    """Entry point. Bad input is one line and exit code 2, a request that fails one and code 1."""
    try:
        app()
    except (InputError, RequestFailure) as error:
        print(f"peagle: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)

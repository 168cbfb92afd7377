"""`peagle deploy`: serve a catalog entry here, on Kubernetes or on SageMaker."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from peagle.catalog import find_entry
from peagle.cli.catalog import CatalogOption
from peagle.config import InputError
from peagle.deploy import kubernetes
from peagle.deploy.spec import DeployFailed, Spec, make_spec, resource_name

PLACES = ("kubernetes",)


class _StartByDefault(TyperGroup):
    """`peagle deploy NAME` is short for `peagle deploy start NAME`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in (*self.commands, "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_StartByDefault, no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="A catalog name.", show_default=False)]
ToOption = Annotated[str, typer.Option("--to", help="kubernetes.", show_default=False)]
EngineOption = Annotated[
    str | None, typer.Option(help="native or vllm. Default: vllm, where it can read the target.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
NamespaceOption = Annotated[str, typer.Option(help="Kubernetes: namespace.")]
ContextOption = Annotated[str | None, typer.Option(help="Kubernetes: kubectl's context.")]
LinesOption = Annotated[int, typer.Option(help="How many of the last lines.")]


@app.callback()
def deploy() -> None:
    """Serve a model by its catalog name. `peagle deploy NAME …` starts it."""


@app.command()
def start(
    name: NameArgument,
    to: ToOption,
    engine: EngineOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent; send nothing.")
    ] = False,
    yes: YesOption = False,
    image: Annotated[
        str | None, typer.Option(help="Container image. Default: vLLM's; needed for native.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="How many at least.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="How many at most. Default: 4 on Kubernetes.")
    ] = None,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    catalog: CatalogOption = None,
) -> None:
    """Start a model, or bring a running one to what is asked for now."""
    spec = _spec(name, to, engine, catalog)
    most = max(replicas, 4) if max_replicas is None else max_replicas
    cluster = kubernetes.Cluster(namespace, image, context, replicas, most)
    text = kubernetes.dry_run(spec, cluster)
    if dry_run:
        typer.echo(text, nl=False)
        return
    _ask(f"start {name} in namespace {namespace}", yes)
    with _failures():
        typer.echo(kubernetes.apply(spec, cluster), nl=False)
    secret = f"kubectl -n {namespace} get secret {spec.resource}-api-key"
    typer.echo(f"http://{spec.resource}.{namespace}.svc/v1 in the cluster; its key:")
    typer.echo(f"{secret} -o go-template='{{{{index .data \"api-key\" | base64decode}}}}'")


@app.command()
def status(
    name: NameArgument,
    to: ToOption,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
) -> None:
    """How a model is doing."""
    _check_place(to)
    with _failures():
        cluster = kubernetes.Cluster(namespace, context=context)
        typer.echo(kubernetes.status(resource_name(name), cluster), nl=False)


@app.command()
def logs(
    name: NameArgument,
    to: ToOption,
    lines: LinesOption = 100,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
) -> None:
    """The last lines that a model's engine wrote."""
    _check_place(to)
    with _failures():
        cluster = kubernetes.Cluster(namespace, context=context)
        typer.echo(kubernetes.logs(resource_name(name), cluster, lines), nl=False)


@app.command()
def delete(
    name: NameArgument,
    to: ToOption,
    yes: YesOption = False,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
) -> None:
    """Stop a model and remove everything that was made for it."""
    _check_place(to)
    _ask(f"delete {name} from namespace {namespace}, its weights and its key with it", yes)
    with _failures():
        cluster = kubernetes.Cluster(namespace, context=context)
        typer.echo(kubernetes.delete(resource_name(name), cluster), nl=False)


def _check_place(to: str) -> None:
    if to not in PLACES:
        raise InputError(f"--to {to!r}: choose {', '.join(PLACES)}")


def _spec(name: str, to: str, engine: str | None, catalog: Path | None) -> Spec:
    _check_place(to)
    return make_spec(name, find_entry(name, catalog), engine, remote=to != "local")


def _ask(what: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{what}: nobody can be asked here: confirm with --yes")
    typer.confirm(f"{what}?", abort=True)


@contextmanager
def _failures() -> Iterator[None]:
    """A failure of the other side is one line and exit code 1."""
    try:
        yield
    except DeployFailed as error:
        typer.echo(f"peagle: {error}", err=True)
        raise typer.Exit(1) from error

"""`peagle deploy`: serve a catalog entry on this machine, on Kubernetes or on SageMaker."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from peagle.catalog import find_entry
from peagle.cli.catalog import CatalogOption
from peagle.config import InputError
from peagle.deploy import kubernetes, local, sagemaker
from peagle.deploy.spec import DeployFailed, Spec, make_spec, resource_name

PLACES = ("local", "kubernetes", "sagemaker")


class _StartByDefault(TyperGroup):
    """`peagle deploy NAME` is short for `peagle deploy start NAME`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in (*self.commands, "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_StartByDefault, add_completion=False, no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="A catalog name.", show_default=False)]
ToOption = Annotated[
    str, typer.Option("--to", help="local, kubernetes or sagemaker.", show_default=False)
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
NamespaceOption = Annotated[str, typer.Option(help="Kubernetes: namespace.")]
ContextOption = Annotated[str | None, typer.Option(help="Kubernetes: kubectl's context.")]
RegionOption = Annotated[
    str | None,
    typer.Option(envvar=["AWS_REGION", "AWS_DEFAULT_REGION"], help="SageMaker: AWS region."),
]


@app.callback()
def deploy() -> None:
    """Serve a model by its catalog name. `peagle deploy NAME --to PLACE` starts it."""


@app.command()
def start(
    name: NameArgument,
    to: ToOption,
    engine: Annotated[
        str | None, typer.Option(help="native or vllm. Default: native here, vllm elsewhere.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent or run; do nothing.")
    ] = False,
    yes: YesOption = False,
    image: Annotated[
        str | None, typer.Option(help="Container image. Default: vLLM's; native needs one.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="How many at least.")] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(help="How many at most. Default: 4 on Kubernetes, no more on SageMaker."),
    ] = None,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    region: RegionOption = None,
    role: Annotated[str, typer.Option(help="SageMaker: ARN of the execution role.")] = "",
    instance_type: Annotated[str, typer.Option(help="SageMaker: such as ml.p5.4xlarge.")] = "",
    port: Annotated[int, typer.Option(help="Local: port; 0 is any that is free.")] = 8000,
    wait: Annotated[float, typer.Option(help="Local: seconds to become healthy in.")] = 1800,
    catalog: CatalogOption = None,
) -> None:
    """Start a model, or bring a running one to what is asked for now."""
    _check_place(to)
    spec = make_spec(name, find_entry(name, catalog), engine, remote=to != "local")
    if to == "local":
        if catalog is not None:  # the process looks names up, too
            spec = replace(spec, env={**spec.env, "PEAGLE_CATALOG": str(catalog.resolve())})
        _start_local(spec, port, wait, dry_run)
    elif to == "kubernetes":
        most = max(replicas, 4) if max_replicas is None else max_replicas
        cluster = kubernetes.Cluster(namespace, image, context, replicas, most)
        _start_kubernetes(spec, cluster, dry_run, yes)
    else:
        account = sagemaker.Account(
            _region(region), role, instance_type, image, replicas, max_replicas
        )
        _start_sagemaker(spec, account, dry_run, yes)


@app.command()
def status(
    name: NameArgument,
    to: ToOption,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    region: RegionOption = None,
) -> None:
    """How a model is doing."""
    _check_place(to)
    with _failures():
        if to == "local":
            _show(local.status(name))
        elif to == "kubernetes":
            cluster = kubernetes.Cluster(namespace, context=context)
            typer.echo(kubernetes.status(resource_name(name), cluster), nl=False)
        else:
            _show(sagemaker.status(resource_name(name), _region(region)))


@app.command()
def logs(
    name: NameArgument,
    to: ToOption,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 100,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    region: RegionOption = None,
) -> None:
    """The last lines that a model's engine wrote."""
    _check_place(to)
    with _failures():
        if to == "kubernetes":
            cluster = kubernetes.Cluster(namespace, context=context)
            typer.echo(kubernetes.logs(resource_name(name), cluster, lines), nl=False)
            return
        if to == "local":
            written = local.logs(name, lines)
        else:
            written = sagemaker.logs(resource_name(name), _region(region), lines)
        for line in written:
            typer.echo(line)


@app.command()
def delete(
    name: NameArgument,
    to: ToOption,
    yes: YesOption = False,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    region: RegionOption = None,
) -> None:
    """Stop a model and remove everything that was made for it."""
    _check_place(to)
    with _failures():
        if to == "local":
            typer.echo("stopped" if local.delete(name) else "was not running")
        elif to == "kubernetes":
            what = f"from namespace {namespace}, its weights and its key with it"
            _ask(f"delete {name} {what}", yes)
            cluster = kubernetes.Cluster(namespace, context=context)
            typer.echo(kubernetes.delete(resource_name(name), cluster), nl=False)
        else:
            where = _region(region)
            _ask(f"delete {name} from SageMaker in {where}", yes)
            for deleted in sagemaker.delete(resource_name(name), where):
                typer.echo(f"deleted {deleted}")


def _start_local(spec: Spec, port: int, wait: float, dry_run: bool) -> None:
    if dry_run:
        typer.echo(
            json.dumps({"command": local.command(spec, port), "environment": dict(spec.env)})
        )
        return
    running = local.find(spec.name)
    if running is None:
        port = local.free_port(port)
        with _failures():
            running = local.start(spec, local.command(spec, port), port, wait)
    else:
        typer.echo(f"{spec.name} is running already", err=True)
    typer.echo(f"url: {running.url}/v1\nkey: {running.key}\nmodel: {spec.name}")


def _start_kubernetes(spec: Spec, cluster: kubernetes.Cluster, dry_run: bool, yes: bool) -> None:
    text = kubernetes.dry_run(spec, cluster)
    if dry_run:
        typer.echo(text, nl=False)
        return
    _ask(f"start {spec.name} in namespace {cluster.namespace}", yes)
    with _failures():
        typer.echo(kubernetes.apply(spec, cluster), nl=False)
    secret = f"kubectl -n {cluster.namespace} get secret {spec.resource}-api-key"
    typer.echo(f"http://{spec.resource}.{cluster.namespace}.svc/v1 in the cluster; its key:")
    typer.echo(f"{secret} -o go-template='{{{{index .data \"api-key\" | base64decode}}}}'")


def _start_sagemaker(spec: Spec, account: sagemaker.Account, dry_run: bool, yes: bool) -> None:
    text = sagemaker.dry_run(spec, account)
    if dry_run:
        typer.echo(text)
        return
    instances = f"{account.replicas} × {account.instance_type}"
    _ask(f"start {spec.name} on {instances} in {account.region}, which costs money", yes)
    with _failures():
        endpoint = sagemaker.deploy(spec, account, lambda line: typer.echo(line, err=True))
    typer.echo(f"endpoint {endpoint} in {account.region} is in service")


def _check_place(to: str) -> None:
    if to not in PLACES:
        raise InputError(f"--to {to!r}: choose {', '.join(PLACES)}")


def _region(region: str | None) -> str:
    if not region:
        raise InputError("--region is missing: name it, or set AWS_REGION")
    return region


def _show(found: dict[str, Any]) -> None:
    typer.echo(json.dumps(found))


def _ask(what: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{what}: nobody can be asked here: confirm with --yes")
    typer.confirm(f"{what}?", abort=True)


@contextmanager
def _failures() -> Iterator[None]:
    """A failure of the other side is a line and exit code 1."""
    try:
        yield
    except DeployFailed as error:
        typer.echo(f"peagle: {error}", err=True)
        raise typer.Exit(1) from error

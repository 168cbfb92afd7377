"""`peagle deploy`: serve a catalog entry on this machine, on Kubernetes or on SageMaker."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from peagle.catalog import Entry, find_entry, known_entry
from peagle.catalog_fields import is_hub_id
from peagle.cli.catalog import CatalogOption
from peagle.deploy import kubernetes, local, sagemaker
from peagle.deploy.account import PLACEHOLDERS, Account
from peagle.deploy.drafting import Drafting
from peagle.deploy.spec import DeployFailed, Spec, make_spec, resource_name, with_profile
from peagle.errors import InputError
from peagle.vllm.process import default_engine

PLACES = ("local", "kubernetes", "sagemaker")


class _StartByDefault(TyperGroup):
    """`peagle deploy NAME` is short for `peagle deploy start NAME`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in (*self.commands, "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_StartByDefault, add_completion=False, no_args_is_help=True)

NameArgument = Annotated[
    str,
    typer.Argument(
        help="Name of the model: a catalog name or a hub id (owner/name@revision).",
        show_default=False,
    ),
]
ToOption = Annotated[
    str,
    typer.Option(
        "--to", help="Place to deploy to: local, kubernetes or sagemaker.", show_default=False
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
NamespaceOption = Annotated[str, typer.Option(help="Namespace, with --to kubernetes.")]
ContextOption = Annotated[
    str | None,
    typer.Option(help="Context of kubectl, with --to kubernetes. Default: the current one."),
]
RegionOption = Annotated[
    str | None,
    typer.Option(
        envvar=["AWS_REGION", "AWS_DEFAULT_REGION"], help="AWS region, with --to sagemaker."
    ),
]


@app.callback()
def deploy() -> None:
    """Serve a model by its catalog name or hub id. `peagle deploy NAME --to PLACE` starts it."""


@app.command()
def start(
    name: NameArgument,
    to: ToOption,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine: native or vllm. Default: with --to local, vllm on a machine with a GPU "
            "and an installed vLLM, else native; elsewhere vllm (native for packaged models)."
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Draft head: a hub id (owner/name@revision), or a folder with --to local. "
            "Default: the catalog's head for the model."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Drafting method, p-eagle or eagle3: chooses among the catalog's heads, or tells "
            "what --head is. Default: p-eagle where there is such a head."
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(
            help="Number of draft tokens per round (num_speculative_tokens). Default: the "
            "catalog's with vllm, chosen every round with native."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Profile of the catalog entry, such as benchmark: more vLLM flags. Default: none."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent or run, and do nothing.")
    ] = False,
    yes: YesOption = False,
    image: Annotated[
        str | None,
        typer.Option(
            help="Container image, not with --to local. Default: an image of vLLM; --engine native "
            "needs one."
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            help="Number of replicas (on SageMaker: instances); the minimum if they are scaled."
        ),
    ] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of replicas. Default: 4 on Kubernetes, --replicas on SageMaker."
        ),
    ] = None,
    namespace: NamespaceOption = "default",
    context: ContextOption = None,
    region: RegionOption = None,
    role: Annotated[str, typer.Option(help="ARN of the execution role, with --to sagemaker.")] = "",
    instance_type: Annotated[
        str, typer.Option(help="Instance type, with --to sagemaker, such as ml.p5.4xlarge.")
    ] = "",
    port: Annotated[
        int, typer.Option(help="Port to listen on, with --to local; 0 takes any free port.")
    ] = 8000,
    wait: Annotated[
        float,
        typer.Option(help="Seconds within which the server must become healthy, with --to local."),
    ] = 1800,
    catalog: CatalogOption = None,
) -> None:
    """Start a model, or bring a running one to what is asked for now."""
    _check_place(to)
    entry = with_profile(name, _entry(name, catalog), profile)
    drafting = Drafting(head, method, k)
    if engine is None and to == "local":
        engine, why = default_engine()
        if why:
            typer.echo(why, err=True)
    spec = make_spec(name, entry, engine, remote=to != "local", drafting=drafting)
    if profile is not None and spec.engine == "native":
        raise InputError(f"--profile {profile}: profiles are flags of vLLM: use --engine vllm")
    if to == "local":
        if catalog is not None:  # the process looks names up, too
            spec = replace(spec, env={**spec.env, "PEAGLE_CATALOG": str(catalog.resolve())})
        _start_local(spec, port, wait, dry_run)
    elif to == "kubernetes":
        most = max(replicas, 4) if max_replicas is None else max_replicas
        cluster = kubernetes.Cluster(namespace, image, context, replicas, most)
        _start_kubernetes(spec, cluster, dry_run, yes)
    else:
        where = {"region": region or "", "role": role, "instance_type": instance_type}
        if dry_run:
            where = _with_placeholders(where)
        else:
            _region(region)
        account = Account(**where, image=image, replicas=replicas, max_replicas=max_replicas)
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
    lines: Annotated[
        int, typer.Option(min=1, help="Number of lines to print, from the end.")
    ] = 100,
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


def _start_sagemaker(spec: Spec, account: Account, dry_run: bool, yes: bool) -> None:
    text = sagemaker.dry_run(spec, account)
    if dry_run:
        typer.echo(text)
        return
    instances = f"{account.replicas} × {account.instance_type}"
    _ask(f"start {spec.name} on {instances} in {account.region}, which costs money", yes)
    with _failures():
        endpoint = sagemaker.deploy(spec, account, lambda line: typer.echo(line, err=True))
    typer.echo(f"endpoint {endpoint} in {account.region} is in service")


def _with_placeholders(given: dict[str, str]) -> dict[str, str]:
    """Placeholders for what is not given, each named on stderr with its option."""
    missing = [name for name, value in given.items() if not value]
    if missing:
        named = [f"{PLACEHOLDERS[name]} (--{name.replace('_', '-')})" for name in missing]
        typer.echo(f"placeholders, to be given when it starts: {', '.join(named)}", err=True)
    return {name: value or PLACEHOLDERS[name] for name, value in given.items()}


def _entry(name: str, catalog: Path | None) -> Entry:
    """The catalog's entry. A hub id that it does not know has neither a head nor flags."""
    entry = known_entry(name, catalog)
    if entry is None and is_hub_id(name):
        return Entry(target=name, heads={})
    return entry or find_entry(name, catalog)


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

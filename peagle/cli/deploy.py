"""`peagle deploy`: serve a catalog entry on this machine, on Kubernetes or on SageMaker."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle.catalog import Entry, find_entry, known_entry
from peagle.catalog_fields import is_hub_id
from peagle.cli.catalog import CatalogOption
from peagle.cli.options import App, check_at_least, flag, group_with_default
from peagle.deploy import kubernetes, sagemaker
from peagle.deploy.drafting import Drafting
from peagle.deploy.sagemaker import PLACEHOLDERS, Account
from peagle.deploy.spec import DeployFailed, Spec, make_spec, resource_name, with_profile
from peagle.errors import InputError

app = App(cls=group_with_default("start"), no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a deployment.

    to: Place to deploy to: local, kubernetes or sagemaker.
    namespace: Namespace, with --to kubernetes.
    context: Context of kubectl, with --to kubernetes. Default: the current one.
    """

    to: Literal["local", "kubernetes", "sagemaker"]
    namespace: str = "default"
    context: str | None = None
    region: Annotated[
        str | None,
        typer.Option(
            envvar=["AWS_REGION", "AWS_DEFAULT_REGION"], help="AWS region, with --to sagemaker."
        ),
    ] = None

    def check_remote(self) -> None:
        """Raises InputError for this machine, where nothing runs in the background."""
        if self.to == "local":
            why = "the terminal of `peagle serve` shows its log, and Ctrl-C there ends it"
            raise InputError(why, field="to", value=self.to)

    @property
    def cluster(self) -> kubernetes.Cluster:
        """The cluster to ask about what runs there."""
        return kubernetes.Cluster(self.namespace, context=self.context)

    def aws_region(self) -> str:
        """The region. Raises InputError when it is missing."""
        if not self.region:
            raise InputError("is missing", field="region", fix="name it, or set AWS_REGION")
        return self.region


@dataclass(frozen=True, slots=True)
class Size:
    """Image and hardware of a deployment.

    image: Container image, not with --to local. Default: an image of vLLM; --engine native needs
        one.
    replicas: Number of replicas (on SageMaker: instances); the minimum if they are scaled.
    max_replicas: Maximum number of replicas. Default: 4 on Kubernetes, --replicas on SageMaker.
    role: ARN of the execution role, with --to sagemaker.
    instance_type: Instance type, with --to sagemaker, such as ml.p5.4xlarge.
    """

    image: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    role: str = ""
    instance_type: str = ""


NameArgument = Annotated[
    str,
    typer.Argument(
        help="Name of the model: a catalog name or a hub id (owner/name@revision).",
        show_default=False,
    ),
]
YesOption = Annotated[bool, "Do not ask for confirmation."]


@app.callback()
def deploy() -> None:
    """Serve a model by its catalog name or hub id. `peagle deploy NAME --to PLACE` starts it."""


@app.command()
def start(
    name: NameArgument,
    *,
    where: Where,
    engine: str | None = None,
    head: str | None = None,
    method: str | None = None,
    k: int | None = None,
    profile: str | None = None,
    dry_run: bool = False,
    yes: bool = False,
    size: Size,
    port: int | None = None,
    catalog: CatalogOption = None,
) -> None:
    """Start a model, or bring a running one to these options.

    --to local prints the command line of peagle serve.

    engine: Engine: native or vllm. Default: with --to local, vllm on a machine with a GPU and an
        installed vLLM, else native; elsewhere vllm (native for packaged models).
    head: Draft head: a hub id (owner/name@revision), or a folder with --to local. Default: the
        catalog's head for the model.
    method: Drafting method, p-eagle or eagle3: chooses among the catalog's heads, or names the
        method of --head. Default: p-eagle where there is such a head.
    k: Number of draft tokens per round (num_speculative_tokens). Default: the catalog's with vllm,
        chosen every round with native.
    profile: Profile of the catalog entry, such as benchmark: more vLLM flags. Default: none.
    dry_run: Print what would be sent or run, and do nothing.
    yes: Do not ask for confirmation; with --to local, run the printed command.
    port: TCP port to listen on, with --to local. Default: that of peagle serve.
    """
    here = where.to == "local"
    entry = with_profile(name, _entry(name, catalog), profile)
    if engine is None and here:
        from peagle.cli.common import resolve_engine  # needs torch

        engine = resolve_engine("auto", None, (), "auto")
    drafting = Drafting(head, method, k)
    spec = make_spec(name, entry, engine, remote=not here, drafting=drafting)
    if profile is not None and spec.engine == "native":
        why = "profiles are flags of vLLM"
        raise InputError(why, field="profile", value=profile, fix="set `engine` to vllm")
    if here:
        flags = entry.profiles[profile] if profile else {}
        _serve(spec.serve_command(port, flags), catalog, run=yes and not dry_run)
    elif where.to == "kubernetes":
        max_replicas = size.max_replicas
        if max_replicas is None:
            max_replicas = max(size.replicas, 4)
        cluster = kubernetes.Cluster(
            where.namespace, size.image, where.context, size.replicas, max_replicas
        )
        _start_kubernetes(spec, cluster, dry_run, yes)
    else:
        _start_sagemaker(spec, _account(where, size, dry_run), dry_run, yes)


@app.command()
def status(name: NameArgument, *, where: Where) -> None:
    """Print the state of a model, with --to kubernetes or sagemaker."""
    where.check_remote()
    with _failures():
        if where.to == "kubernetes":
            typer.echo(kubernetes.status(resource_name(name), where.cluster), nl=False)
        else:
            typer.echo(json.dumps(sagemaker.status(resource_name(name), where.aws_region())))


@app.command()
def logs(name: NameArgument, *, where: Where, lines: int = 100) -> None:
    """The last lines that a model's engine wrote, with --to kubernetes or sagemaker.

    lines: Number of lines to print, from the end.
    """
    where.check_remote()
    check_at_least(1, lines=lines)
    with _failures():
        if where.to == "kubernetes":
            typer.echo(kubernetes.logs(resource_name(name), where.cluster, lines), nl=False)
            return
        for line in sagemaker.logs(resource_name(name), where.aws_region(), lines):
            typer.echo(line)


@app.command()
def delete(name: NameArgument, *, where: Where, yes: YesOption = False) -> None:
    """Stop a model and remove all that was made for it, with --to kubernetes or sagemaker."""
    where.check_remote()
    with _failures():
        if where.to == "kubernetes":
            what = f"from namespace {where.namespace}, its weights and its key with it"
            _ask(f"delete {name} {what}", yes)
            typer.echo(kubernetes.delete(resource_name(name), where.cluster), nl=False)
        else:
            region = where.aws_region()
            _ask(f"delete {name} from SageMaker in {region}", yes)
            for deleted in sagemaker.delete(resource_name(name), region):
                typer.echo(f"deleted {deleted}")


def _serve(line: list[str], catalog: Path | None, *, run: bool) -> None:
    """Print the command line for this machine; with `run`, become that process."""
    env = {} if catalog is None else {"PEAGLE_CATALOG": str(catalog.resolve())}
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    typer.echo(" ".join([*variables, shlex.join(line)]))
    if run:
        os.execve(sys.executable, [sys.executable, "-m", *line], os.environ | env)


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


def _account(where: Where, size: Size, dry_run: bool) -> Account:
    """The account and hardware for SageMaker; a dry run has placeholders for missing options, which
    are named on stderr."""
    region = where.region if dry_run else where.aws_region()
    fields = {"region": region or "", "role": size.role, "instance_type": size.instance_type}
    missing = [name for name, value in fields.items() if not value]
    if missing and dry_run:
        named = [f"{PLACEHOLDERS[name]} ({flag(name)})" for name in missing]
        typer.echo(f"placeholders, to be given when it starts: {', '.join(named)}", err=True)
        fields |= {name: PLACEHOLDERS[name] for name in missing}
    return Account(
        **fields, image=size.image, replicas=size.replicas, max_replicas=size.max_replicas
    )


def _entry(name: str, catalog: Path | None) -> Entry:
    """The catalog's entry. A hub id that it does not know has neither a head nor flags."""
    entry = known_entry(name, catalog)
    if entry is None and is_hub_id(name):
        return Entry(target=name, heads={})
    return entry or find_entry(name, catalog)


def _ask(what: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"no terminal to confirm on; give --yes to {what}")
    typer.confirm(f"{what}?", abort=True)


@contextmanager
def _failures() -> Iterator[None]:
    """A failure of the other side is a line and exit code 1."""
    try:
        yield
    except DeployFailed as error:
        typer.echo(f"peagle: {error}", err=True)
        raise typer.Exit(1) from error

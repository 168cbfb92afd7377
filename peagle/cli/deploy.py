"""`peagle deploy`: serve a catalog entry on this machine, on Kubernetes or on SageMaker."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle.catalog import Entry, find_entry, flag_options, known_entry
from peagle.catalog_fields import is_hub_id
from peagle.cli.catalog import CatalogOption
from peagle.cli.options import App, check_at_least, group_with_default
from peagle.deploy import kubernetes, sagemaker
from peagle.deploy.kubernetes import Cluster
from peagle.deploy.plan import Choices, DeployFailed, Plan, make_plan, resource_name
from peagle.deploy.sagemaker import Account
from peagle.errors import InputError

LOCAL_URL = "http://127.0.0.1:8000"
app = App(cls=group_with_default("start"), no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a deployment.

    to: Place to deploy to: local, kubernetes or sagemaker.
    namespace: Namespace, with --to kubernetes.
    """

    to: Literal["local", "kubernetes", "sagemaker"]
    namespace: str = "default"
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Form, with --to kubernetes: stack (values of vLLM's production-stack chart), "
            "kserve (an LLMInferenceService) or manifests. Default: stack; manifests for the "
            "native engine.",
        ),
    ] = None
    region: Annotated[
        str | None,
        typer.Option(
            envvar=["AWS_REGION", "AWS_DEFAULT_REGION"], help="AWS region, with --to sagemaker."
        ),
    ] = None

    def aws_region(self) -> str:
        """The region. Raises InputError when it is missing."""
        if not self.region:
            raise InputError("is missing", field="region", fix="name it, or set AWS_REGION")
        return self.region

    def cluster(self) -> Cluster:
        """The cluster to ask about what runs there. Raises InputError for this machine."""
        if self.to == "local":
            why = "the terminal of `peagle serve` shows its log, and Ctrl-C there ends it"
            raise InputError(why, field="to", value=self.to)
        return Cluster(self.form or "stack", self.namespace)


@dataclass(frozen=True, slots=True)
class Size:
    """Number of replicas, and the account on SageMaker.

    replicas: Number of replicas (on SageMaker: instances); the minimum if they are scaled.
    max_replicas: Maximum number of replicas: above --replicas, more are started for waiting
        requests. Default: --replicas.
    SageMaker:
    role: ARN of the execution role. Default: one that is made with the endpoint.
    weights: Folder on S3 with the target's files, s3://BUCKET/FOLDER. Default: from the hub, at
        every start of an instance.
    subnets: ID of a subnet for the instances; repeat the option for several. Default: no VPC.
    security_groups: ID of a security group for the instances; repeat the option for several.
    kms_key: ARN of a KMS key for volumes and weights. Default: AWS's own.
    token_secret: Name of the secret in Secrets Manager that is the hub's token, for gated models.
    """

    replicas: int = 1
    max_replicas: int | None = None
    role: str | None = None
    weights: str | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    token_secret: str | None = None


NameArgument = Annotated[
    str,
    typer.Argument(
        help="Name of the model: a catalog name or a hub id (owner/name@revision).",
        show_default=False,
    ),
]
YesOption = Annotated[bool, "Run the printed command; on SageMaker, do not ask for confirmation."]


@app.callback()
def deploy() -> None:
    """Serve a model by its catalog name or hub id. `peagle deploy NAME --to PLACE` starts it."""


@app.command()
def start(
    name: NameArgument,
    *,
    where: Where,
    choices: Choices,
    dry_run: bool = False,
    yes: YesOption = False,
    size: Size,
    port: int | None = None,
    catalog: CatalogOption = None,
) -> None:
    """Start a model, or bring a running one to these options.

    --to local prints the command line of peagle serve, and --to kubernetes what helm or kubectl
    takes: --yes runs them. --to sagemaker applies a CloudFormation stack.

    dry_run: Print what would be sent or run, and do nothing.
    port: TCP port to listen on, with --to local. Default: that of peagle serve.
    """
    entry = _entry(name, catalog)
    if choices.engine is None and where.to == "local":
        choices = _with_engine(choices)
    plan = make_plan(name, entry, where.to, choices)
    if choices.profile is not None and plan.engine == "native":
        why = "profiles are flags of vLLM"
        raise InputError(why, field="profile", value=choices.profile, fix="set `engine` to vllm")
    if where.to == "local":
        flags = entry.profiles[choices.profile] if choices.profile else {}
        _serve(_line(plan, choices, port, flag_options(flags)), catalog, run=yes and not dry_run)
    elif where.to == "kubernetes":
        form = where.form or ("stack" if plan.engine == "vllm" else "manifests")
        cluster = Cluster(form, where.namespace, size.replicas, size.max_replicas)
        text = kubernetes.rendered(plan, cluster, pinned=choices.gpu is not None)
        line = kubernetes.command("start", plan.resource, cluster, file="-")
        if not yes or dry_run:
            typer.echo(text, nl=False)
            return
        raise typer.Exit(kubernetes.run(line, text))
    else:
        _start_sagemaker(plan, Account(region=where.region, **asdict(size)), dry_run, yes)


@app.command()
def status(name: NameArgument, *, where: Where, yes: YesOption = False) -> None:
    """Print the state of a model on SageMaker, or the command that does for Kubernetes."""
    cluster = where.cluster()
    if where.to == "kubernetes":
        _hand_over(kubernetes.command("status", resource_name(name), cluster), yes)
    with _failures():
        typer.echo(json.dumps(sagemaker.status(resource_name(name), where.aws_region())))


@app.command()
def logs(name: NameArgument, *, where: Where, lines: int = 100, yes: YesOption = False) -> None:
    """The last lines that a model's engine wrote on SageMaker, or the command for Kubernetes.

    lines: Number of lines to print, from the end.
    """
    cluster = where.cluster()
    check_at_least(1, lines=lines)
    if where.to == "kubernetes":
        _hand_over(kubernetes.command("logs", resource_name(name), cluster, lines=lines), yes)
    with _failures():
        for line in sagemaker.logs(resource_name(name), where.aws_region(), lines):
            typer.echo(line)


@app.command()
def delete(name: NameArgument, *, where: Where, yes: YesOption = False) -> None:
    """Stop a model and remove all that was made for it, or print the command for Kubernetes."""
    cluster = where.cluster()
    if where.to == "kubernetes":
        _hand_over(kubernetes.command("delete", resource_name(name), cluster), yes)
    region = where.aws_region()
    _ask(f"delete {name} from SageMaker in {region}", yes)
    with _failures():
        sagemaker.delete(resource_name(name), region, _report)


@app.command()
def invoke(
    name: NameArgument,
    *,
    where: Where,
    prompt: str = "Name three colours.",
    max_tokens: int = 256,
    url: str = LOCAL_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=["PEAGLE_API_KEY", "VLLM_API_KEY"], help="API key of the server."),
    ] = None,
) -> None:
    """Ask a running model: prints its answer as it comes, tokens a second and acceptance.

    prompt: Question to ask.
    max_tokens: Maximum number of tokens of the answer.
    url: Address of the server, not with --to sagemaker. A model on Kubernetes is there while the
        command runs that a failure prints.
    """
    from peagle.deploy.invoke import acceptance, ask, drafted, over_http, question

    check_at_least(1, max_tokens=max_tokens)
    body = question(name, prompt, max_tokens)
    local = where.to != "sagemaker"
    before = drafted(url, api_key) if local else None
    with _failures():
        if local:
            parts = over_http(url, api_key, body)
        else:
            parts = sagemaker.invoke(resource_name(name), where.aws_region(), body)
        try:
            speed = ask(parts, lambda text: typer.echo(text, nl=False))
        except DeployFailed as error:
            if where.to == "kubernetes" and url == LOCAL_URL:
                line = kubernetes.command("forward", resource_name(name), where.cluster())
                raise DeployFailed(f"{error}; does this run? {shlex.join(line)}") from error
            raise
    accepted = "its metrics in CloudWatch have the acceptance"
    if local:
        accepted = acceptance(before, drafted(url, api_key))
    typer.echo(f"\n{speed}; {accepted}", err=True)


def _with_engine(choices: Choices) -> Choices:
    """The choices with this machine's engine."""
    from peagle.cli.common import resolve_engine  # needs torch

    return Choices(**{**asdict(choices), "engine": resolve_engine("auto", None, (), "auto")})


def _line(plan: Plan, choices: Choices, port: int | None, flags: list[str]) -> list[str]:
    """The command line on this machine. `peagle serve` reads the entry's flags for vLLM itself;
    `flags` are further ones."""
    options = {"head": plan.head, "k": choices.k, "max-batch": choices.load, "port": port}
    given = flag_options({name: value for name, value in options.items() if value is not None})
    line = ["peagle", "serve", plan.name, "--engine", plan.engine, *given]
    return [*line, "--", *flags] if flags else line


def _serve(line: list[str], catalog: Path | None, *, run: bool) -> None:
    """Print the command line for this machine; with `run`, become that process."""
    env = {} if catalog is None else {"PEAGLE_CATALOG": str(catalog.resolve())}
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    typer.echo(" ".join([*variables, shlex.join(line)]))
    if run:
        os.execve(sys.executable, [sys.executable, "-m", *line], os.environ | env)


def _start_sagemaker(plan: Plan, account: Account, dry_run: bool, yes: bool) -> None:
    if dry_run:
        typer.echo(sagemaker.template(plan, account), nl=False)
        return
    if account.region is None:
        raise InputError("is missing", field="region", fix="name it, or set AWS_REGION")
    instances = f"{account.replicas} × {plan.instance_type}"
    _ask(f"start {plan.name} on {instances} in {account.region}, which costs money", yes)
    with _failures():
        sagemaker.apply(plan, account, _report)
    typer.echo(f"endpoint {plan.resource} in {account.region} is in service")


def _hand_over(line: list[str], yes: bool) -> None:
    """Print a command of helm or kubectl, or with `yes` run it, and end."""
    if yes:
        raise typer.Exit(kubernetes.run(line))
    typer.echo(shlex.join(line))
    raise typer.Exit


def _report(line: str) -> None:
    typer.echo(line, err=True)


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

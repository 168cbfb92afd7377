"""`peagle deploy`: serve a catalog entry on this machine, on Kubernetes or on SageMaker."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import typer

from peagle.catalog import Entry, find_entry, flag_options, known_entry
from peagle.catalog_fields import is_hub_id
from peagle.cli.options import App, Fields, check_at_least, group_with_default
from peagle.deploy import kubernetes, sagemaker
from peagle.deploy.kubernetes import Cluster
from peagle.deploy.plan import Choices, DeployFailed, Plan, make_plan, resource_name
from peagle.deploy.sagemaker import Account
from peagle.errors import InputError

# Fields of an account that are options; the region is an option of all commands.
OF_A_START = Fields(*(field.name for field in fields(Account) if field.name != "region"))
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

    def hand_over(self, verb: str, name: str, yes: bool, **given: object) -> None:
        """For Kubernetes print a command of helm or kubectl, or with `yes` run it, and end. Raises
        InputError for this machine."""
        if self.to == "local":
            why = "the terminal of `peagle serve` shows its log, and Ctrl-C there ends it"
            raise InputError(why, field="to", value=self.to)
        if self.to == "kubernetes":
            line = self.command(verb, name, **given)
            if yes:
                raise typer.Exit(kubernetes.run(line))
            typer.echo(shlex.join(line))
            raise typer.Exit

    def command(self, verb: str, name: str, **given: object) -> list[str]:
        """A command of helm or kubectl."""
        cluster = Cluster(self.form or "stack", self.namespace)
        return kubernetes.command(verb, resource_name(name), cluster, **given)


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
    account: Annotated[Account, OF_A_START],
    port: int | None = None,
) -> None:
    """Start a model, or bring a running one to these options.

    --to local prints the command line of peagle serve, and --to kubernetes what helm or kubectl
    takes: --yes runs them. --to sagemaker applies a CloudFormation stack.

    dry_run: Print what would be sent or run, and do nothing.
    port: TCP port to listen on, with --to local. Default: that of peagle serve.
    """
    entry = _entry(name)
    if choices.engine is None and where.to == "local":
        choices = _with_engine(choices)
    plan = make_plan(name, entry, where.to, choices)
    if choices.profile is not None and plan.engine == "native":
        why = "profiles are flags of vLLM"
        raise InputError(why, field="profile", value=choices.profile, fix="set `engine` to vllm")
    if where.to == "local":
        flags = entry.profiles[choices.profile] if choices.profile else {}
        _serve(_line(plan, choices, port, flag_options(flags)), run=yes and not dry_run)
    elif where.to == "kubernetes":
        form = where.form or ("stack" if plan.engine == "vllm" else "manifests")
        cluster = Cluster(form, where.namespace, account.replicas, account.max_replicas)
        text = kubernetes.rendered(plan, cluster, pinned=choices.gpu is not None)
        line = kubernetes.command("start", plan.resource, cluster, file="-")
        if not yes or dry_run:
            typer.echo(text, nl=False)
            return
        raise typer.Exit(kubernetes.run(line, text))
    else:
        region = where.region if dry_run else where.aws_region()
        _start_sagemaker(plan, replace(account, region=region), dry_run, yes)


@app.command()
def status(name: NameArgument, *, where: Where, yes: YesOption = False) -> None:
    """Print the state of a model on SageMaker, or the command that does for Kubernetes."""
    where.hand_over("status", name, yes)
    with _failures():
        typer.echo(json.dumps(sagemaker.status(resource_name(name), where.aws_region())))


@app.command()
def logs(name: NameArgument, *, where: Where, lines: int = 100, yes: YesOption = False) -> None:
    """The last lines that a model's engine wrote on SageMaker, or the command for Kubernetes.

    lines: Number of lines to print, from the end.
    """
    check_at_least(1, lines=lines)
    where.hand_over("logs", name, yes, lines=lines)
    with _failures():
        for line in sagemaker.logs(resource_name(name), where.aws_region(), lines):
            typer.echo(line)


@app.command()
def delete(name: NameArgument, *, where: Where, yes: YesOption = False) -> None:
    """Stop a model and remove all that was made for it, or print the command for Kubernetes."""
    where.hand_over("delete", name, yes)
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
                line = shlex.join(where.command("forward", name))
                raise DeployFailed(f"{error}; does this run? {line}") from error
            raise
    accepted = "its metrics in CloudWatch have the acceptance"
    if local:
        accepted = acceptance(before, drafted(url, api_key))
    typer.echo(f"\n{speed}; {accepted}", err=True)


def _with_engine(choices: Choices) -> Choices:
    """The choices with this machine's engine."""
    from peagle.cli.common import resolve_engine  # needs torch

    return replace(choices, engine=resolve_engine("auto", None, (), "auto"))


def _line(plan: Plan, choices: Choices, port: int | None, flags: list[str]) -> list[str]:
    """The command line on this machine. `peagle serve` reads the entry's flags for vLLM itself;
    `flags` are further ones."""
    options = {"head": plan.head, "k": choices.k, "max-batch": choices.load, "port": port}
    given = flag_options({name: value for name, value in options.items() if value is not None})
    line = ["peagle", "serve", plan.name, "--engine", plan.engine, *given]
    return [*line, "--", *flags] if flags else line


def _serve(line: list[str], *, run: bool) -> None:
    """Print the command line for this machine; with `run`, become that process."""
    typer.echo(shlex.join(line))
    if run:
        os.execv(sys.executable, [sys.executable, "-m", *line])


def _start_sagemaker(plan: Plan, account: Account, dry_run: bool, yes: bool) -> None:
    if dry_run:
        typer.echo(sagemaker.template(plan, account), nl=False)
        return
    instances = f"{account.replicas} × {plan.instance_type}"
    _ask(f"start {plan.name} on {instances} in {account.region}, which costs money", yes)
    with _failures():
        sagemaker.apply(plan, account, _report)
    typer.echo(f"endpoint {plan.resource} in {account.region} is in service")


def _report(line: str) -> None:
    typer.echo(line, err=True)


def _entry(name: str) -> Entry:
    """The catalog's entry. A hub id that it does not know has neither a head nor flags."""
    entry = known_entry(name)
    if entry is None and is_hub_id(name):
        return Entry(target=name, heads={})
    return entry or find_entry(name)


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

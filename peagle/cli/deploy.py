"""`peagle deploy`: serve a catalog entry on this machine, on Kubernetes or on SageMaker."""

import os
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import typer

from peagle.catalog import Entry, find_entry, known_entry
from peagle.catalog_fields import is_hub_id
from peagle.cli.common import failing
from peagle.cli.options import App, group_with_default, refuse_idle
from peagle.deploy import kubernetes, sagemaker
from peagle.deploy.plan import Choices, DeployFailed, make_plan, profile_flags, resource_name
from peagle.deploy.sagemaker import Account
from peagle.errors import InputError, check_at_least
from peagle.vllm.flags import flag_options

ELSEWHERE = ("gpu", "image", "replicas", "max_replicas")
ONLY_AT = {  # options that do nothing at other places
    "local": (),
    "kubernetes": ("namespace", "form", *ELSEWHERE),
    "sagemaker": ("region", "instance_type", *Account.__annotations__, *ELSEWHERE),
}
_report = partial(typer.echo, err=True)
app = App(cls=group_with_default("start"), no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a deployment.

    to: Place to deploy to: local, kubernetes or sagemaker.
    region: AWS region, with `to` sagemaker.
    """

    to: Literal["local", "kubernetes", "sagemaker"]
    region: Annotated[str | None, typer.Option(envvar=["AWS_REGION", "AWS_DEFAULT_REGION"])] = None


@app.callback()
def deploy() -> None:
    """Serve a model by its catalog name or hub id. `peagle deploy NAME --to PLACE` starts it."""


@app.command()
def start(
    context: typer.Context,
    name: str,
    *,
    where: Where,
    namespace: str = "default",
    form: Annotated[str | None, typer.Option("--as")] = None,
    choices: Choices,
    dry_run: bool = False,
    yes: bool = False,
    account: Account,
) -> None:
    """Start a model, or bring a running one to these options.

    --to local prints the command line of peagle serve, and --to kubernetes what helm or kubectl
    takes: --yes runs them. --to sagemaker applies a CloudFormation stack.

    namespace: Namespace, with --to kubernetes.
    form: Form, with --to kubernetes: stack (values of vLLM's production-stack chart), kserve or
        manifests. Default: stack; manifests for the native engine.
    dry_run: Print what would be sent or run, and do nothing.
    yes: Run the printed command; on SageMaker, do not ask for confirmation.
    """
    idle = set().union(*ONLY_AT.values()).difference(ONLY_AT[where.to])
    refuse_idle(context, sorted(idle), f"with --to {where.to}")
    # A hub id that the catalog does not know has neither a head nor flags.
    unknown = known_entry(name) is None and is_hub_id(name)
    entry = Entry(target=name, heads={}) if unknown else find_entry(name)
    if where.to == "local":
        line = _line(name, entry, choices)
        typer.echo(shlex.join(line))
        if yes and not dry_run:
            os.execv(sys.executable, [sys.executable, "-m", *line])
        return
    plan = make_plan(name, entry, where.to, choices)
    if where.to == "kubernetes":
        form = form or ("stack" if plan.engine == "vllm" else "manifests")
        text = kubernetes.rendered(plan, form, namespace, pinned=choices.gpu is not None)
        if yes and not dry_run:
            raise typer.Exit(kubernetes.run(kubernetes.command(plan, form, namespace), text))
        typer.echo(text, nl=False)
    elif dry_run:
        typer.echo(sagemaker.template(plan, account, where.region), nl=False)
    else:
        region = _region(where)
        instances = f"{plan.replicas} × {plan.instance_type}"
        _ask(f"start {name} on {instances} in {region}, which costs money", yes)
        with failing(DeployFailed):
            sagemaker.apply(plan, account, region, _report)
        typer.echo(f"endpoint {plan.resource} in {region} is in service")


@app.command()
def delete(name: str, *, where: Where, yes: bool = False) -> None:
    """Stop a model on SageMaker and remove all that was made for it.

    yes: Do not ask for confirmation.
    """
    region = _region(where)
    _ask(f"delete {name} from SageMaker in {region}", yes)
    with failing(DeployFailed):
        sagemaker.delete(resource_name(name), region, _report)


@app.command()
def invoke(
    context: typer.Context,
    name: str,
    *,
    where: Where,
    prompt: str = "Name three colours.",
    max_tokens: int = 256,
    url: str = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar=["PEAGLE_API_KEY", "VLLM_API_KEY"])] = None,
) -> None:
    """Ask a running model: prints its answer as it comes, tokens a second and acceptance.

    prompt: Question to ask.
    max_tokens: Maximum number of tokens of the answer.
    url: Address of the server, not with --to sagemaker. On Kubernetes, forward a port first.
    api_key: API key of the server, not with --to sagemaker.
    """
    from peagle.deploy.invoke import acceptance, ask, drafted, over_http, question

    idle = ("url", "api_key") if where.to == "sagemaker" else ("region",)
    refuse_idle(context, idle, f"with --to {where.to}")
    check_at_least(1, max_tokens=max_tokens)
    body = question(name, prompt, max_tokens)
    show = partial(typer.echo, nl=False)
    with failing(DeployFailed):
        if where.to == "sagemaker":
            speed = ask(sagemaker.invoke(resource_name(name), _region(where), body), show)
            accepted = "its metrics in CloudWatch have the acceptance"
        else:
            before = drafted(url, api_key)
            speed = ask(over_http(url, api_key, body), show)
            accepted = acceptance(before, drafted(url, api_key))
    typer.echo(f"\n{speed}; {accepted}", err=True)


def _region(where: Where) -> str:
    """The region of a deployment on SageMaker. Raises InputError for other places."""
    if where.to != "sagemaker":
        fix = "use helm or kubectl, or end `peagle serve` by Ctrl-C"
        raise InputError("is not managed here", field="to", value=where.to, fix=fix)
    if not where.region:
        raise InputError("is missing", field="region", fix="name it, or set AWS_REGION")
    return where.region


def _line(name: str, entry: Entry, choices: Choices) -> list[str]:
    """The line of `peagle serve` on this machine, which finds the head and the entry's flags."""
    engine = choices.engine or ("vllm" if choices.profile else None)
    flags = flag_options(profile_flags(name, entry, choices.profile, engine, None))
    options = {"engine": engine, "head": choices.head, "method": choices.method, "k": choices.k,
               "max-batch": choices.load}  # fmt: skip
    return ["peagle", "serve", name, *flag_options(options), *(["--", *flags] if flags else [])]


def _ask(what: str, yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise InputError(f"no terminal to confirm on; give --yes to {what}")
    if not yes and not typer.confirm(f"{what}?"):
        raise typer.Exit(1)

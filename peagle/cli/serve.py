"""`peagle serve`: an OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    HeadOption,
    KOption,
    MethodOption,
    NoSpeculationOption,
    QuantizeOption,
    TargetArgument,
    open_llm,
)
from peagle.config import InputError

app = typer.Typer(add_completion=False)
# Options that vLLM has otherwise, and what to do.
NOT_VLLMS = {
    "device": "vLLM finds its devices itself, leave it out",
    "quantize": "give vLLM's --quantization behind --",
    "kv_tokens": "give vLLM's --kv-cache-memory-bytes behind --",
    "allowed_hosts": "vLLM answers to every name, leave it out",
    "max_queue": "vLLM's queue has no end, leave it out",
    "max_seconds": "vLLM's requests have no limit of time, leave it out",
}


@app.command()
def serve(
    context: typer.Context,
    target: TargetArgument,
    vllm_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_FLAGS...]", help="Passed to vLLM.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option(help="native, or vllm in an interpreter of its own.")] = (
        "native"
    ),
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            envvar="PEAGLE_VLLM_PYTHON", help="The interpreter that has vLLM. Default: this one."
        ),
    ] = None,
    head: HeadOption = None,
    method: MethodOption = None,
    no_speculation: NoSpeculationOption = False,
    k: KOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PEAGLE_API_KEY", help="What clients must bring as a bearer token."),
    ] = None,
    allow_no_key: Annotated[
        bool, typer.Option("--allow-no-key", help="Listen to others without an API key.")
    ] = False,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Host names, besides this machine's own, that requests without an API key may ask "
            "for; * is any. Give it once for each name."
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Requests that run together.")] = 8,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens of KV cache. Default: by free memory.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; others get 429.")] = 256,
    max_seconds: Annotated[
        float, typer.Option(help="Time of a request, its wait included; then it ends as it is.")
    ] = 600,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: TARGET.")
    ] = None,
    chat_template: ChatTemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    quantize: QuantizeOption = None,
    force: ForceOption = False,
) -> None:
    """Serve a target by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /metrics.

    SIGTERM or Ctrl-C lets running requests finish; a second one cancels them.
    """
    try:
        from peagle.server.app import ServerConfig
        from peagle.server.logs import log_to_stderr
        from peagle.server.run import bind, check_host
        from peagle.server.run import serve as run
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed"
        raise InputError(f"serve: {why}, pip install 'peagle[serve]'") from error

    if engine == "vllm":
        from peagle.cli.serve_vllm import Asked, serve_vllm

        given = {name for name in context.params if _given(context, name)}
        for name, why in NOT_VLLMS.items():
            if name in given:
                raise InputError(f"--{name.replace('_', '-')} with --engine vllm: {why}")
        serve_vllm(
            Asked(
                target=target,
                head=head,
                method="none" if no_speculation else method,
                k=k,
                host=host,
                port=port,
                api_key=api_key,
                allow_no_key=allow_no_key,
                max_batch=max_batch if "max_batch" in given else None,
                model=served_model_name or target,
                chat_template=chat_template,
                dtype=dtype,
                force=force,
                python=vllm_python,
                flags=vllm_flags or [],
            )
        )
    if engine != "native":
        raise InputError(f"--engine {engine!r}: choose native or vllm")
    if vllm_flags:
        raise InputError(f"{vllm_flags[0]}: flags behind -- are vLLM's: use --engine vllm")
    check_host(host, api_key, allow_no_key)
    if max_queue < 0:
        raise InputError(f"--max-queue {max_queue}: must be at least 0")
    if not max_seconds > 0:
        raise InputError(f"--max-seconds {max_seconds:g}: must be above 0")
    listening = bind(host, port)
    llm = open_llm(
        target,
        head,
        method,
        k,
        no_speculation=no_speculation,
        dtype=dtype,
        device=device,
        quantize=quantize,
        force=force,
        chat_template=chat_template,
        max_batch=max_batch,
        kv_tokens=kv_tokens,
    )
    log_to_stderr()
    names = tuple(name.lower() for name in allowed_hosts or ())
    config = ServerConfig(served_model_name or target, api_key, max_queue, max_seconds, names)
    if not run(llm, config, listening):
        raise typer.Exit(1)


def _given(context: typer.Context, name: str) -> bool:
    """Whether it was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"

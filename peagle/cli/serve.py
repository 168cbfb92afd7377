"""`peagle serve`: an OpenAI-compatible server."""

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

app = typer.Typer()


@app.command()
def serve(
    target: TargetArgument,
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
    config = ServerConfig(served_model_name or target, api_key, max_queue, max_seconds)
    if not run(llm, config, listening):
        raise typer.Exit(1)

"""`peagle serve`: an OpenAI-compatible server."""

from dataclasses import replace
from typing import Annotated

import typer

from peagle.cli.common import (
    ModelOptions,
    TargetArgument,
    check_quantize_device,
    open_llm,
)
from peagle.cli.engines import NOT_VLLMS, EngineOption, VllmPythonOption, resolve_engine
from peagle.cli.options import App, check_at_least, given
from peagle.errors import InputError
from peagle.model.loader import resolve_device
from peagle.shown import model_name

app = App()
VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- VLLM_FLAGS...]",
        help="Flags of `vllm serve`, passed on unchanged; only with vllm as the engine.",
        show_default=False,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="PEAGLE_API_KEY",
        help="API key that every request must carry as a bearer token. Default: no key is needed.",
    ),
]


@app.command()
def serve(
    context: typer.Context,
    target: TargetArgument,
    vllm_flags: VllmFlags = None,
    *,
    engine: EngineOption = "auto",
    vllm_python: VllmPythonOption = None,
    options: ModelOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: ApiKeyOption = None,
    allow_no_key: bool = False,
    allowed_hosts: list[str] | None = None,
    max_batch: int | None = None,
    kv_tokens: int | None = None,
    max_queue: int = 256,
    max_seconds: float = 600,
    served_model_name: str | None = None,
) -> None:
    """Serve a target by OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /metrics.

    SIGTERM or Ctrl-C lets running requests finish; a second one cancels them.

    host: IP address or host name to listen on. Other than loopback addresses need --api-key.
    port: TCP port to listen on; 0 selects a free port.
    allow_no_key: Listen on an address that other machines reach without an API key.
    allowed_hosts: Host name that requests without an API key may be addressed to, besides this
        machine's own; * allows every name. Repeat the option for several names.
    max_batch: Maximum number of requests decoded together. Default: 8 on a CPU, 64 on a GPU, fewer
        where memory is short; vLLM's own with vllm.
    kv_tokens: Size of the KV cache in tokens. Default: enough for --max-batch requests, or as many
        as fit in free memory.
    max_queue: Maximum number of waiting requests; more are answered with status 429.
    max_seconds: Maximum time of one request in seconds, waiting included; its answer then ends.
    served_model_name: Model name that clients use in requests. Default: TARGET, of a path the last
        part without .gguf.
    """
    try:
        from peagle.server.app import ServerConfig
        from peagle.server.run import bind, check_host, log_to_stderr
        from peagle.server.run import serve as run
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed"
        raise InputError(f"serve: {why}, pip install 'peagle[serve]'") from error
    from peagle.cli.serve_lines import Serving

    check_at_least(1, k=options.k)
    model = served_model_name or model_name(target)
    named = [name for name in NOT_VLLMS if given(context, name)]
    if resolve_engine(engine, vllm_python, named, options.device) == "vllm":
        from peagle.cli.serve_vllm import serve_vllm
        from peagle.vllm.serve import ServeSettings

        serve_vllm(
            ServeSettings(
                target=target,
                head=options.head,
                method=options.drafting,
                k=options.k,
                host=host,
                port=port,
                api_key=api_key,
                allow_no_key=allow_no_key,
                max_batch=max_batch,
                model=model,
                chat_template=options.chat_template,
                dtype=options.dtype,
                force=options.force,
                python=vllm_python,
                flags=vllm_flags or [],
            )
        )
    if vllm_flags:
        raise InputError(f"{vllm_flags[0]}: flags after -- are vLLM's: use --engine vllm")
    check_host(host, api_key, allow_no_key)
    check_at_least(0, max_queue=max_queue)
    if not max_seconds > 0:
        raise InputError(f"--max-seconds {max_seconds:g}: must be above 0")
    check_quantize_device(options.quantize, options.device)
    listening = bind(host, port)
    options = replace(options, device=resolve_device(options.device))
    llm = open_llm(target, options, max_batch=max_batch, kv_tokens=kv_tokens)
    log_to_stderr()
    names = tuple(name.lower() for name in allowed_hosts or ())
    config = ServerConfig(model, api_key, max_queue, max_seconds, names)
    number, chat = listening.getsockname()[1], bool(llm.tokenizer.chat_template)
    people = Serving(model, host, number, key="PEAGLE_API_KEY" if api_key else None, chat=chat)
    if not run(llm, config, listening, people.show):
        raise typer.Exit(1)

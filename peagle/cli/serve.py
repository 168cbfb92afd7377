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
    check_quantize_device,
    open_llm,
)
from peagle.cli.engines import VLLM_DEVICES, EngineOption, VllmPythonOption, resolve_engine
from peagle.errors import InputError
from peagle.model.loader import resolve_device

app = typer.Typer(add_completion=False)
# Options of the native engine only, and what to do with vLLM.
NOT_VLLMS = {
    "device": "vLLM finds its devices itself, leave it out",
    "quantize": "give vLLM's --quantization after --",
    "kv_tokens": "give vLLM's --kv-cache-memory-bytes after --",
    "allowed_hosts": "vLLM answers to every name, leave it out",
    "max_queue": "vLLM's queue has no end, leave it out",
    "max_seconds": "vLLM's requests have no limit of time, leave it out",
}
VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- VLLM_FLAGS...]",
        help="Flags of `vllm serve`, passed on unchanged; only with vllm as the engine.",
        show_default=False,
    ),
]
HostOption = Annotated[
    str,
    typer.Option(
        help="IP address or host name to listen on. Other than loopback addresses need --api-key."
    ),
]
PortOption = Annotated[int, typer.Option(help="TCP port to listen on; 0 selects a free port.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="PEAGLE_API_KEY",
        help="API key that every request must carry as a bearer token. Default: no key is needed.",
    ),
]
AllowNoKeyOption = Annotated[
    bool,
    typer.Option(
        "--allow-no-key", help="Listen on an address that other machines reach without an API key."
    ),
]
AllowedHostsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Host name that requests without an API key may be addressed to, besides this "
        "machine's own; * allows every name. Repeat the option for several names."
    ),
]
MaxBatchOption = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of requests decoded together. Default: 8 on a CPU, 64 on a GPU, fewer "
        "where memory is short; vLLM's own with vllm."
    ),
]
KVTokensOption = Annotated[
    int | None,
    typer.Option(
        help="Size of the KV cache in tokens. Default: enough for --max-batch requests, or as many "
        "as fit in free memory."
    ),
]
MaxQueueOption = Annotated[
    int, typer.Option(help="Maximum number of waiting requests; more are answered with status 429.")
]
MaxSecondsOption = Annotated[
    float,
    typer.Option(
        help="Maximum time of one request in seconds, waiting included; its answer then ends."
    ),
]
ServedNameOption = Annotated[
    str | None, typer.Option(help="Model name that clients use in requests. Default: TARGET.")
]


@app.command()
def serve(
    context: typer.Context,
    target: TargetArgument,
    vllm_flags: VllmFlags = None,
    engine: EngineOption = "auto",
    vllm_python: VllmPythonOption = None,
    head: HeadOption = None,
    method: MethodOption = None,
    no_speculation: NoSpeculationOption = False,
    k: KOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: ApiKeyOption = None,
    allow_no_key: AllowNoKeyOption = False,
    allowed_hosts: AllowedHostsOption = None,
    max_batch: MaxBatchOption = None,
    kv_tokens: KVTokensOption = None,
    max_queue: MaxQueueOption = 256,
    max_seconds: MaxSecondsOption = 600,
    served_model_name: ServedNameOption = None,
    chat_template: ChatTemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
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
    from peagle.cli.serve_lines import Serving

    model, native_only = served_model_name or target, _native_only(context, device)
    if resolve_engine(engine, vllm_python, map(_flag, native_only), device) == "vllm":
        from peagle.cli.serve_vllm import serve_vllm
        from peagle.vllm.serve import ServeSettings

        for name in native_only:
            raise InputError(f"{_flag(name)} with --engine vllm: {NOT_VLLMS[name]}")
        serve_vllm(
            ServeSettings(
                target=target,
                head=head,
                method="none" if no_speculation else method,
                k=k,
                host=host,
                port=port,
                api_key=api_key,
                allow_no_key=allow_no_key,
                max_batch=max_batch,
                model=model,
                chat_template=chat_template,
                dtype=dtype,
                force=force,
                python=vllm_python,
                flags=vllm_flags or [],
            )
        )
    if vllm_flags:
        raise InputError(f"{vllm_flags[0]}: flags after -- are vLLM's: use --engine vllm")
    check_host(host, api_key, allow_no_key)
    if max_queue < 0:
        raise InputError(f"--max-queue {max_queue}: must be at least 0")
    if not max_seconds > 0:
        raise InputError(f"--max-seconds {max_seconds:g}: must be above 0")
    check_quantize_device(quantize, device)
    listening = bind(host, port)
    llm = open_llm(
        target,
        head,
        method,
        k,
        no_speculation=no_speculation,
        dtype=dtype,
        device=resolve_device(device),
        quantize=quantize,
        force=force,
        chat_template=chat_template,
        max_batch=max_batch,
        kv_tokens=kv_tokens,
    )
    log_to_stderr()
    names = tuple(name.lower() for name in allowed_hosts or ())
    config = ServerConfig(model, api_key, max_queue, max_seconds, names)
    number, chat = listening.getsockname()[1], bool(llm.tokenizer.chat_template)
    people = Serving(model, host, number, key="PEAGLE_API_KEY" if api_key else None, chat=chat)
    if not run(llm, config, listening, people.show):
        raise typer.Exit(1)


def _native_only(context: typer.Context, device: str) -> list[str]:
    """Options on the command line that vLLM lacks."""
    given = [name for name in NOT_VLLMS if _given(context, name)]
    return [name for name in given if name != "device" or device not in VLLM_DEVICES]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(context: typer.Context, name: str) -> bool:
    """Whether it was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"

"""`peagle serve`: an OpenAI-compatible server."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from peagle.catalog import model_name
from peagle.cli import common
from peagle.cli.options import given
from peagle.errors import InputError, check_at_least

if TYPE_CHECKING:
    from peagle.vllm.serve import ServeSettings

PAGES = "peagle.server.middleware.Pages"  # serves the console in front of vLLM
THIS_MACHINE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
# These are checked here; of a flag given twice, vLLM takes the last.
OPTIONS_OF_SERVE = ("--host", "--port", "--api-key", "--model", "--served-model-name")
VLLM_FLAGS = typer.Argument(metavar="[-- VLLM_FLAGS...]", show_default=False)


class Serving(NamedTuple):
    """A running server, as its start is announced."""

    model: str  # as clients call it
    host: str  # as it was bound
    port: int
    key: str | None = None  # environment variable of the API key that requests need
    chat: bool = True  # whether the model has a chat template
    console: bool = True

    @property
    def url(self) -> str:
        """An address that this machine reaches."""
        host = THIS_MACHINE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def lines(self) -> list[str]:
        """The URL, a curl command, the console. The API key itself is never shown."""
        console = f"{self.url}/" if self.console else f"-- --middleware {PAGES} adds it to vLLM"
        return [f"Serving {self.model} at {self.url}/v1", self.curl(), f"Console: {console}"]

    def curl(self) -> str:
        """A request that a POSIX shell runs as it is; the key comes from its variable."""
        path = "completions"
        asked: dict[str, object] = {"prompt": "Once upon a time"}
        if self.chat:
            path = "chat/completions"
            asked = {"messages": [{"role": "user", "content": "Hello!"}]}
        headers = ["-H 'Content-Type: application/json'"]
        if self.key:
            headers.append(f'-H "Authorization: Bearer ${self.key}"')
        data = shlex.quote(json.dumps({"model": self.model, **asked, "max_tokens": 64}))
        return f"curl {shlex.quote(f'{self.url}/v1/{path}')} {' '.join(headers)} -d {data}"

    def show(self) -> None:
        """Print the lines on stdout; the log is on stderr."""
        typer.echo("\n".join(self.lines()))


def serve(
    context: typer.Context,
    target: str,
    vllm_flags: Annotated[list[str] | None, VLLM_FLAGS] = None,
    *,
    engine: Literal["auto", "native", "vllm"] = "auto",
    vllm_python: common.VllmPythonOption = None,
    options: common.ModelOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="PEAGLE_API_KEY")] = None,
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

    With vLLM they have 25 seconds (before 0.18 none), and a second one changes nothing.

    vllm_flags: Flags of `vllm serve`, passed on unchanged; only with vllm as the engine.
    engine: Engine that runs the model: auto, native or vllm. Auto is vllm on a machine with a GPU
        and an installed vLLM, else native.
    host: IP address or host name to listen on. Other than loopback addresses need --api-key.
    port: TCP port to listen on; 0 selects a free port.
    api_key: API key that every request must carry as a bearer token. Default: no key is needed.
    allow_no_key: Listen on an address that other machines reach without an API key.
    allowed_hosts: Host name that requests without an API key may be addressed to, besides this
        machine's own; * allows every name. Repeat the option for several names.
    max_batch: Maximum number of requests decoded together. Default: 8 on a CPU, 64 on a GPU, fewer
        where memory is short; with vllm 64 on a GPU, vLLM's own on a CPU.
    kv_tokens: Size of the KV cache in tokens. Default: enough for --max-batch requests, or as many
        as fit in free memory.
    max_queue: Maximum number of waiting requests; more are answered with status 429.
    max_seconds: Maximum time of one request in seconds, waiting included; its answer then ends.
    served_model_name: Model name that clients use in requests. Default: TARGET, of a path the last
        part without .gguf.
    """
    try:
        from peagle.model.loader import resolve_device
        from peagle.server.app import ServerConfig
        from peagle.server.run import bind, check_host, log_to_stderr
        from peagle.server.run import serve as run
    except ModuleNotFoundError as error:
        fix = "pip install 'peagle[serve]'"
        raise InputError(f"{error.name} is not installed", fix=fix) from error

    model = served_model_name or model_name(target)
    check_host(host, api_key, allow_no_key)
    check_at_least(1, max_batch=max_batch)
    named = {name: context.params[name] for name in common.NOT_VLLMS if given(context, name)}
    if common.resolve_engine(engine, vllm_python, named) == "vllm":
        from peagle.vllm.serve import ServeSettings

        settings = ServeSettings(
            target=target, head=options.head, method=options.chosen_method, k=options.k, host=host,
            port=port, api_key=api_key, max_batch=max_batch, model=model,
            chat_template=options.chat_template, dtype=options.dtype, force=options.force,
            python=vllm_python, flags=vllm_flags or [],
        )  # fmt: skip
        _serve_vllm(settings)
    if vllm_flags:
        why = "flags after -- are vLLM's"
        raise InputError(why, field="vllm_flags", value=vllm_flags[0], fix="set `engine` to vllm")
    check_at_least(0, max_queue=max_queue)
    if not max_seconds > 0:
        raise InputError("must be above 0", field="max_seconds", value=max_seconds)
    listening = bind(host, port)
    options = replace(options, device=resolve_device(options.device))
    llm = common.open_llm(target, options, max_batch=max_batch, kv_tokens=kv_tokens)
    common.make_engine(llm)
    log_to_stderr()
    names = tuple(name.lower() for name in allowed_hosts or ())
    config = ServerConfig(model, api_key, max_queue, max_seconds, names)
    number = listening.getsockname()[1]
    chat = bool(llm.tokenizer.chat_template)
    people = Serving(model, host, number, key="PEAGLE_API_KEY" if api_key else None, chat=chat)
    if not run(llm, config, listening, people.show):
        raise typer.Exit(1)


def _serve_vllm(settings: "ServeSettings") -> None:
    """Run vLLM; does not return. Raises InputError for what can be seen to be wrong before."""
    from transformers.utils import logging

    from peagle.server.run import bind
    from peagle.vllm.serve import prepare

    logging.disable_progress_bar()
    _check_flags(settings.flags)
    with bind(settings.host, settings.port) as free:  # vLLM's own error is long
        settings = replace(settings, port=free.getsockname()[1])
    launch = prepare(settings)
    common.screen.print(launch.summary)
    console = any(PAGES in flag for flag in settings.flags)
    of_vllm = "VLLM_API_KEY" if launch.environ.get("VLLM_API_KEY") else None
    key = "PEAGLE_API_KEY" if settings.api_key else of_vllm
    Serving(settings.model, settings.host, settings.port, key=key, console=console).show()
    sys.stdout.flush()
    os.execvpe(launch.command[0], launch.command, launch.environ)


def _check_flags(flags: Sequence[str]) -> None:
    """Raise InputError for those of vLLM's flags that are options of `peagle serve`."""
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in OPTIONS_OF_SERVE:
            why = "is an option of peagle serve, not of vLLM"
            raise InputError(why, field=name[2:].replace("-", "_"), fix="give it before --")

"""`peagle serve --engine vllm`: vLLM in the place of this process."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from peagle.cli.common import screen
from peagle.cli.serve_lines import PAGES, Serving
from peagle.errors import InputError
from peagle.server.run import bind, check_host
from peagle.vllm.serve import ServeSettings, prepare

# Where it listens and to whom is checked here. Of a flag given twice, vLLM takes the last.
OURS = ("host", "port", "api-key", "model")


def serve_vllm(settings: ServeSettings) -> None:
    """Run vLLM; does not return. Raises InputError for what can be seen to be wrong before."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    _check_flags(settings.flags)
    check_host(settings.host, settings.api_key, settings.allow_no_key)
    with bind(settings.host, settings.port) as free:  # vLLM's own error is long
        settings = replace(settings, port=free.getsockname()[1])
    launch = prepare(settings)
    screen.print(launch.summary)
    console = any(PAGES in flag for flag in settings.flags)
    own = "VLLM_API_KEY" if launch.environ.get("VLLM_API_KEY") else None
    key = "PEAGLE_API_KEY" if settings.api_key else own
    Serving(settings.model, settings.host, settings.port, key=key, console=console).show()
    sys.stdout.flush()
    os.execve(launch.command[0], launch.command, launch.environ)


def _check_flags(flags: Sequence[str]) -> None:
    """Raise InputError for those of vLLM's flags that are options of `peagle serve`."""
    given = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    for flag in given:
        name = flag.removeprefix("--").replace("_", "-")
        if name in OURS:
            raise InputError(f"--{name}: give it before --, it is an option of peagle serve")

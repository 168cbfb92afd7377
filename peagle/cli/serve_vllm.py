"""`peagle serve --engine vllm`: vLLM in the place of this process."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.catalog import flag_options, known_entry
from peagle.cli.common import screen
from peagle.cli.serve_lines import PAGES, Serving
from peagle.errors import InputError
from peagle.model.loader import locate
from peagle.model.template import PLAIN, load_tokenizer, use_template
from peagle.server.run import bind, check_host
from peagle.vllm.head import as_vllm_reads_it, choose, target_config
from peagle.vllm.process import look
from peagle.vllm.serve import command, environment, plan

# Where it listens and to whom is checked here. Of a flag given twice, vLLM takes the last.
OURS = ("host", "port", "api-key", "model")


@dataclass(frozen=True, slots=True)
class Asked:
    """What `peagle serve` was told, as far as vLLM can do it."""

    target: str
    head: str | None
    method: str | None
    k: int | None
    host: str
    port: int
    api_key: str | None
    allow_no_key: bool
    max_batch: int | None
    model: str  # what clients call it
    chat_template: str | None
    dtype: str
    force: bool
    python: Path | None
    flags: Sequence[str]  # vLLM's own


def serve_vllm(asked: Asked) -> None:
    """Run vLLM; does not return. Raises InputError for what can be seen to be wrong before."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    names = _names(asked.flags)
    check_host(asked.host, asked.api_key, asked.allow_no_key)
    python = asked.python or Path(sys.executable)
    installed = look(python)
    drafts = any(name.startswith("spec") for name in names)
    if drafts and (asked.head or asked.method or asked.k):
        raise InputError("--speculative-config: give it, or --head, --method and --k")
    head = None if drafts else choose(asked.target, asked.head, asked.method, asked.k)
    said, needed = "as its flags say" if drafts else "no head", list[str]()
    if head is not None:
        head = as_vllm_reads_it(head, asked.target, asked.chat_template, force=asked.force)
        said, needed = plan(installed, head, target_config(asked.target))
    entry = known_entry(asked.target)
    given = {**(entry.vllm_env if entry else {}), **os.environ}
    given |= {"VLLM_API_KEY": asked.api_key} if asked.api_key else {}
    environ = environment(installed, head, given)
    with bind(asked.host, asked.port) as free:  # vLLM says in a hundred lines that it is taken
        port = free.getsockname()[1]
    path, revision = locate(asked.target)
    options = ["--host", asked.host, "--port", str(port), "--served-model-name", asked.model]
    options += ["--dtype", asked.dtype, *(["--revision", revision] if revision else [])]
    if asked.max_batch is not None:
        options += ["--max-num-seqs", str(asked.max_batch)]
    if entry is not None:
        options += flag_options(entry.vllm_flags)
        options += ["--tensor-parallel-size", str(entry.gpus)] if entry.gpus > 1 else []
    options += [*_template(asked), *needed, *asked.flags]
    line = command(python, installed, path, options, head)
    where = f"{asked.host}:{port}"
    screen.print(f"{installed.package} {installed.version} at {where}, {asked.model}: {said}")
    console = any(PAGES in flag for flag in asked.flags)
    own = "VLLM_API_KEY" if environ.get("VLLM_API_KEY") else None
    key = "PEAGLE_API_KEY" if asked.api_key else own
    Serving(asked.model, asked.host, port, key=key, console=console).show()
    sys.stdout.flush()
    os.execve(line[0], line, environ)


def _names(flags: Sequence[str]) -> list[str]:
    """Names of vLLM's flags. Raises InputError for those that are options of `peagle serve`."""
    given = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    names = [flag.removeprefix("--").replace("_", "-") for flag in given]
    for name in names:
        if name in OURS:
            raise InputError(f"--{name}: give it before --, it is an option of peagle serve")
    return names


def _template(asked: Asked) -> list[str]:
    """vLLM takes a file, or the template itself."""
    if asked.chat_template is None:
        return []
    tokenizer = load_tokenizer(asked.target)
    use_template(tokenizer, asked.chat_template)
    if asked.chat_template == PLAIN:
        return ["--chat-template", str(tokenizer.chat_template)]
    return ["--chat-template", str(Path(asked.chat_template).resolve())]

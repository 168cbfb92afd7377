"""The engine that a benchmark measures: the one in this process, or a server."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from peagle.bench.summary import Cell, Result
from peagle.catalog import HEADLESS
from peagle.cli.common import ModelOptions, open_llm
from peagle.engine.drafting import Drafting
from peagle.errors import InputError
from peagle.heads.find import Head, find_head
from peagle.model.loader import resolve_device

AT_RANDOM = 16  # requests that run together, where they come at random times


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured."""

    target: str  # empty: the model that the server has
    named: dict[str, str | None]  # heads by method; None: the catalog's
    model: ModelOptions
    sampled: dict[str, Any]  # max_tokens and ignore_eos
    cells: list[Cell]

    @property
    def most(self) -> int:
        """Requests that run together, at most."""
        return max(cell.concurrency for cell in self.cells) or AT_RANDOM

    @property
    def drafting(self) -> set[str]:
        """The methods that need a head."""
        return {cell.drafting.method for cell in self.cells} - {*HEADLESS}

    def heads(self) -> dict[str, Head]:
        """The head of every method: as named, or the catalog's."""
        heads = dict[str, Head]()
        for method in self.drafting:
            field = method.replace("-", "_")
            head = find_head(self.target, self.named[method], method, field=field)
            assert head is not None
            heads[method] = head
        return heads


@dataclass(frozen=True, slots=True)
class Answering:
    """Who answers, how, and with which heads."""

    device: str
    engine: str
    opened: Callable[..., AbstractAsyncContextManager[Any]]  # of a cell
    heads: dict[str, Head]  # by method
    close: Callable[[], None] = lambda: None
    apart: bool = False  # methods and K one after the other, instead of interleaved

    def groups(self, results: list[Result]) -> list[list[Result]]:
        """What is interleaved."""
        if not self.apart:
            return [results]
        kinds = dict.fromkeys(result.cell.drafting for result in results)
        return [[r for r in results if r.cell.drafting == kind] for kind in kinds]


def native(asked: Asked) -> Answering:
    """The engine in this process; all heads stay loaded."""
    from peagle.bench.native import Native, device_name
    from peagle.engine.params import SamplingParams

    heads = asked.heads()
    alone = replace(asked.model, method="none", device=resolve_device(asked.model.device))
    llm = open_llm(asked.target, alone)
    drafters: dict[str, Any] = dict.fromkeys(HEADLESS)
    for method, head in heads.items():
        drafters[method] = llm.load_head(head.folder, force=asked.model.force)

    loads = count()  # each draws by seeds of its own

    def opened(cell: Cell) -> Native:
        drafter, batch = drafters[cell.drafting.method], cell.concurrency or AT_RANDOM
        used = llm.use(drafter, **cell.drafting.options, max_batch=batch)
        seed = 10_000 * next(loads)
        params = SamplingParams(temperature=cell.temperature, seed=seed, **asked.sampled)
        return Native(used, params)

    return Answering(device_name(), "native", opened, heads)


def server(asked: Asked, url: str, api_key: str | None, hardware: str | None) -> Answering:
    """Somebody's server: its method and K are what it was started with."""
    from peagle.bench.client import ChatClient
    from peagle.data.endpoint import connect

    if len({cell.drafting for cell in asked.cells}) > 1:
        why = "a server has one: name it (--methods p-eagle --k 7)"
        raise InputError(f"--url {url}: several methods or K, {why}")
    [endpoint] = connect([url], asked.target or None, api_key=api_key).endpoints
    body = {"model": endpoint.model, **asked.sampled}
    loads = count()  # each draws by seeds of its own

    def opened(cell: Cell) -> ChatClient:
        drawn = {"temperature": cell.temperature, "seed": 10_000 * next(loads)}
        return ChatClient(endpoint.url, body | drawn, api_key)

    return Answering(hardware or "not told (--hardware)", url, opened, {})


def vllm(asked: Asked, python: Path | None) -> Answering:
    """vLLM on this machine, a server a method and K, one after another."""
    from peagle.bench.client import ChatClient
    from peagle.bench.native import device_name
    from peagle.vllm.process import look, serving

    installed = look(python or Path(sys.executable))
    heads = asked.heads()
    stack, running, loads = ExitStack(), dict[Drafting, str](), count()

    def opened(cell: Cell) -> ChatClient:
        kind = cell.drafting
        if kind not in running:
            stack.close()
            running.clear()
            line = _serve_options(asked, cell, heads.get(kind.method))
            running[kind] = stack.enter_context(serving(line, python))
        drawn = {"temperature": cell.temperature, "seed": 10_000 * next(loads)}
        return ChatClient(running[kind], {"model": "bench", **drawn, **asked.sampled})

    engine = f"{installed.package} {installed.version}"
    return Answering(device_name(), engine, opened, heads, stack.close, apart=True)


def _serve_options(asked: Asked, cell: Cell, head: Head | None) -> list[str]:
    """Options of `peagle serve` for a cell."""
    line = [asked.target, "--method", cell.drafting.method, "--max-batch", str(asked.most)]
    line += ["--dtype", asked.model.dtype, "--served-model-name", "bench"]
    if asked.model.force:
        line.append("--force")
    if head is not None:
        line += ["--head", head.name, "--k", str(cell.drafting.size)]
    if asked.model.chat_template:
        line += ["--chat-template", asked.model.chat_template]
    return line

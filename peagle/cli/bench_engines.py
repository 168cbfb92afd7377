"""The engine under test of a benchmark: the one in this process, or a server."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.load import Conversations
from peagle.bench.run import Load, by_repeat
from peagle.bench.summary import Cell, Result
from peagle.catalog import HEADLESS
from peagle.cli.common import ModelOptions, open_llm
from peagle.engine.drafting import Drafting
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.heads.find import Head

RANDOM_BATCH = 16  # maximum number of concurrent requests that arrive at random times


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The cells to measure, and how their engine runs."""

    target: str  # empty: the model of the server
    named_heads: dict[str, str | None]  # by method; None: the catalog's
    model: ModelOptions
    sampling: dict[str, Any]  # max_tokens and ignore_eos
    cells: list[Cell]

    def heads(self) -> dict[str, "Head"]:
        """The head of every method that drafts by one: as named, or the catalog's."""
        from peagle.heads.find import Head, find_head

        heads = dict[str, Head]()
        for method in {cell.drafting.method for cell in self.cells} - {*HEADLESS}:
            named = self.named_heads[method]
            head = find_head(self.target, named, method, field=method.replace("-", "_"))
            assert head is not None
            heads[method] = head
        return heads


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """An engine that answers the loads of a benchmark."""

    device: str
    name: str
    opened: Callable[[Cell, int], AbstractAsyncContextManager[Any]]
    heads: dict[str, "Head"]  # by method
    close: Callable[[], None] = lambda: None
    one_drafting: bool = False  # it runs one drafting at a time; they cannot be interleaved

    def loads(
        self, results: list[Result], conversations: Conversations, repeats: int
    ) -> Iterator[Load]:
        """The loads in order; cells are interleaved as far as the engine allows."""
        if not self.one_drafting:
            yield from by_repeat(results, conversations, repeats)
            return
        for drafting in dict.fromkeys(result.cell.drafting for result in results):
            group = [result for result in results if result.cell.drafting == drafting]
            yield from by_repeat(group, conversations, repeats)


def native(plan: BenchPlan) -> EngineUnderTest:
    """The engine in this process; all heads stay loaded."""
    from peagle.bench.native import Native, device_name
    from peagle.engine.params import SamplingParams
    from peagle.model.loader import resolve_device

    heads = plan.heads()
    alone = replace(plan.model, method="none", device=resolve_device(plan.model.device))
    llm = open_llm(plan.target, alone)
    drafters: dict[str, Any] = dict.fromkeys(HEADLESS)
    for method, head in heads.items():
        drafters[method] = llm.load_head(head.folder, force=plan.model.force)

    def opened(cell: Cell, seed: int) -> Native:
        drafter = drafters[cell.drafting.method]
        batch = cell.concurrency or RANDOM_BATCH
        used = llm.use(drafter, **cell.drafting.options, max_batch=batch)
        params = SamplingParams(temperature=cell.temperature, seed=seed, **plan.sampling)
        return Native(used, params)

    return EngineUnderTest(device_name(), "native", opened, heads)


def server(plan: BenchPlan, url: str, api_key: str | None, hardware: str | None) -> EngineUnderTest:
    """A running server; its method and K cannot be changed."""
    from peagle.bench.client import ChatClient
    from peagle.data.endpoint import connect

    if len({cell.drafting for cell in plan.cells}) > 1:
        fix = "name the one that it runs, as --methods p-eagle --k 7"
        raise InputError("a server has one method and K", field="url", value=url, fix=fix)
    [endpoint] = connect([url], plan.target or None, api_key=api_key).endpoints

    def opened(cell: Cell, seed: int) -> ChatClient:
        body = {"model": endpoint.model, "temperature": cell.temperature, "seed": seed}
        return ChatClient(endpoint.url, body | plan.sampling, api_key)

    return EngineUnderTest(hardware or "unknown (--hardware)", url, opened, {})


def vllm(plan: BenchPlan, python: Path | None) -> EngineUnderTest:
    """vLLM on this machine, a server for each method and K, one after another."""
    from peagle.bench.client import ChatClient
    from peagle.bench.native import device_name
    from peagle.vllm.process import look, serving

    installed = look(python or Path(sys.executable))
    heads = plan.heads()
    stack = ExitStack()
    running = dict[Drafting, str]()

    def opened(cell: Cell, seed: int) -> ChatClient:
        drafting = cell.drafting
        if drafting not in running:
            stack.close()
            running.clear()
            options = _serve_options(plan, drafting, heads.get(drafting.method))
            running[drafting] = stack.enter_context(serving(options, python))
        body = {"model": "bench", "temperature": cell.temperature, "seed": seed}
        return ChatClient(running[drafting], body | plan.sampling)

    name = f"{installed.package} {installed.version}"
    return EngineUnderTest(device_name(), name, opened, heads, stack.close, one_drafting=True)


def _serve_options(plan: BenchPlan, drafting: Drafting, head: "Head | None") -> list[str]:
    """Options of `peagle serve` for one drafting."""
    batch = max(cell.concurrency for cell in plan.cells) or RANDOM_BATCH
    options = [plan.target, "--method", drafting.method, "--max-batch", str(batch)]
    options += ["--dtype", plan.model.dtype, "--served-model-name", "bench"]
    if plan.model.force:
        options.append("--force")
    if head is not None:
        options += ["--head", head.name, "--k", str(drafting.size)]
    if plan.model.chat_template:
        options += ["--chat-template", plan.model.chat_template]
    return options

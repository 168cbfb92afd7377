"""`peagle bench`: throughput, latency and acceptance, method by method under the same load."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.bench.run import (
    Open,
    Stopped,
    by_repeat,
    compare_files,
    environment,
    make_cells,
    play,
    report,
    write_json,
)
from peagle.bench.summary import Cell, Result
from peagle.catalog import HEADLESS
from peagle.cli.common import (
    EngineOption,
    ModelOptions,
    VllmPythonOption,
    console,
    open_llm,
    print_table,
    progress_bar,
    resolve_engine,
    screen,
)
from peagle.cli.measure import rows_table
from peagle.cli.options import App, Fields, check_at_least, group_with_default, parse_list
from peagle.engine.drafting import ADAPTIVE, Drafting
from peagle.engine.params import SamplingParams
from peagle.errors import InputError
from peagle.files import check_folder, writing
from peagle.shown import model_name
from peagle.vllm.process import VllmFailed

if TYPE_CHECKING:
    from peagle.heads.find import Head

PINNED = "7"  # draft tokens per round where K cannot be chosen every round
COLUMNS = (
    "method", "drafts", "load", "tok/s", "×", "95 %", "nodes", "AL", "TTFT", "TPOT", "same",
)  # fmt: skip
COMPARED = ("method", "drafts", "load", "before", "after", "ratio", "change")
MODEL = Fields("no_lookup", "chat_template", "dtype", "device", "quantize", "force")


app = App(
    cls=group_with_default("run"),
    help="Measure drafting methods under load, and compare measurements (`bench TARGET` is short "
    "for `bench run TARGET`).",
)


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
        from peagle.heads.find import find_head

        heads = dict[str, "Head"]()
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
    opened: Open
    heads: dict[str, "Head"]  # by method
    close: Callable[[], None] = lambda: None
    one_drafting: bool = False  # it runs one drafting at a time; they cannot be interleaved


@app.command()
def run(
    target: str | None = None,
    *,
    methods: str = "none,eagle3,p-eagle",
    eagle3: str | None = None,
    p_eagle: str | None = None,
    k: str | None = None,
    nodes: str | None = None,
    concurrency: str = "1",
    dataset: str = "humaneval",
    limit: int | None = None,
    sampling: Annotated[SamplingParams, Fields("max_tokens", "ignore_eos")],
    temperature: str = "0",
    repeats: int = 3,
    engine: EngineOption = "auto",
    vllm_python: VllmPythonOption = None,
    url: str | None = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PEAGLE_API_KEY", help="API key of the server at --url.")
    ] = None,
    hardware: str | None = None,
    model: Annotated[ModelOptions, MODEL],
    output: Path = Path("results/bench.json"),
) -> None:
    """Play a data set with every method, K, tree, concurrency and temperature, interleaved; write
    rows with 95 % intervals as JSON, and a page with plots next to it.

    target: Target model: a folder, a hub id, a .gguf file or a catalog name. With --url, the
        model's name there.
    methods: Drafting methods to compare, separated by commas.
    eagle3: EAGLE-3 head: a folder or hub id. Default: the catalog's.
    p_eagle: P-EAGLE head: a folder or hub id. Default: the catalog's.
    k: Numbers of draft tokens per round, separated by commas; adaptive chooses every round.
        Default: adaptive; 7 with vllm; none where --nodes is given.
    nodes: Numbers of draft tokens per round as a tree, separated by commas.
    concurrency: Numbers of conversations in flight, separated by commas.
    dataset: Prompts: humaneval, a JSONL or Parquet file, a folder of them, or a hub id.
    limit: Number of conversations to use. Default: all.
    temperature: Sampling temperatures, separated by commas; 0 is greedy decoding.
    repeats: Number of measurements of each cell, interleaved with the others.
    url: Base URL of a running server to measure, as http://host:8000/v1.
    hardware: Hardware of the server at --url, for the report.
    output: JSON file to write the results to.
    """
    from peagle.bench import report as pages
    from peagle.bench.workload import read_workload

    check_at_least(1, repeats=repeats, limit=limit)
    pages.check()  # before hours of measuring
    check_folder(output.parent)
    chosen = "native"
    if url is None:
        named = {
            "k adaptive": ADAPTIVE in (k or "").split(","),
            "nodes": nodes is not None,
            "methods lookup": "lookup" in methods.split(","),
            "device": model.device != "auto",
            "quantize": model.quantize is not None,
        }
        lacking = [option for option, is_given in named.items() if is_given]
        chosen = resolve_engine(engine, vllm_python, lacking, model.device)
    if k is None and nodes is None:
        k = PINNED if chosen == "vllm" else ADAPTIVE
    loads = parse_list(concurrency, "concurrency", int, 1)
    heats = parse_list(temperature, "temperature", float)
    settings = _settings(k, nodes, not model.no_lookup)
    cells = make_cells(methods.split(","), settings, loads, heats)
    workload = read_workload(dataset, limit)
    sampled = {"max_tokens": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
    about = {
        "target": target and model_name(target), "dtype": model.dtype, "quantize": model.quantize,
        "dataset": workload.name, "turns_sha256": workload.digest,
        "conversations": len(workload.conversations), **sampled, "repeats": repeats,
    }  # fmt: skip
    plan = BenchPlan(target or "", {"eagle3": eagle3, "p-eagle": p_eagle}, model, sampled, cells)
    if url is not None:
        engine_under_test = server(plan, url, api_key, hardware)
    elif target is None:
        raise InputError("is missing", field="target", fix="name one, or a server with `url`")
    elif chosen == "vllm":
        engine_under_test = vllm(plan, vllm_python)
    else:
        engine_under_test = native(plan)
    _measure(engine_under_test, cells, workload.conversations, about, output)


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two measurements; exit code 1 when something is slower and the intervals do not
    overlap.

    before: JSON file that `peagle bench` wrote.
    after: JSON file of a later run with the same settings.
    """
    changes = compare_files(before, after)
    print_table(rows_table(changes, *COMPARED))
    if any(row["change"] == "slower" for row in changes):
        raise typer.Exit(1)


def native(plan: BenchPlan) -> EngineUnderTest:
    """The engine in this process; all heads stay loaded."""
    from peagle.bench.native import Native, device_name
    from peagle.model.loader import resolve_device

    heads = plan.heads()
    alone = replace(plan.model, method="none", device=resolve_device(plan.model.device))
    llm = open_llm(plan.target, alone)
    drafters: dict[str, Any] = dict.fromkeys(HEADLESS)
    for method, head in heads.items():
        drafters[method] = llm.load_head(head.folder, force=plan.model.force)

    def opened(cell: Cell, seed: int) -> Native:
        drafter = drafters[cell.drafting.method]
        used = llm.use(drafter, **cell.drafting.options, max_batch=cell.concurrency)
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
    batch = max(cell.concurrency for cell in plan.cells)
    options = [plan.target, "--method", drafting.method, "--max-batch", str(batch)]
    options += ["--dtype", plan.model.dtype, "--served-model-name", "bench"]
    options += ["--force"] if plan.model.force else []
    if head is not None:
        options += ["--head", head.name, "--k", str(drafting.size)]
    if plan.model.chat_template:
        options += ["--chat-template", plan.model.chat_template]
    return options


def _measure(
    engine: EngineUnderTest,
    cells: list[Cell],
    conversations: list[list[str]],
    settings: dict[str, Any],
    output: Path,
) -> None:
    """Play every cell, write what was measured after each, and print it in the end."""
    from peagle.bench import report as pages

    about = {**environment(engine.device), "settings": {**settings, "engine": engine.name}}
    here = f"{Path.cwd()}/"  # results do not name the clone's folder
    heads = {method: head.name.removeprefix(here) for method, head in engine.heads.items()}
    results = [Result(cell, heads.get(cell.drafting.method)) for cell in cells]
    loads = list(by_repeat(results, conversations, settings["repeats"]))
    if engine.one_drafting:
        order = list(dict.fromkeys(cell.drafting for cell in cells))
        loads.sort(key=lambda load: order.index(load.result.cell.drafting))

    def on_load() -> None:
        write_json(output, report(results, about))
        bar.advance(task)

    with progress_bar("loads", f"measured, each is in {output}") as bar, closing(engine):
        task = bar.add_task("", total=len(loads))
        try:
            play(loads, engine.opened, on_load)
        except (Stopped, VllmFailed) as stopped:
            screen.print(f"[red]stopped:[/] {stopped}; what was measured is in {output}")
            raise typer.Exit(1) from stopped
    found = report(results, about)
    with writing(output):
        page = pages.write(found, output)
    title = f"{settings['target']}, {settings['dataset']}, {engine.device}"
    note = "nodes: draft tokens a round; TTFT and TPOT: medians in ms"
    print_table(rows_table(found["rows"], *COLUMNS, title=title, caption=note))
    console.print(f"written: {output}, {page}")


def _settings(k: str | None, nodes: str | None, lookup: bool) -> list[Drafting]:
    """Every chain and every tree, without a method."""
    found = list[Drafting]()
    for depth in k.split(",") if k else []:
        if depth == ADAPTIVE:
            found.append(Drafting("", "auto", lookup=lookup))
        else:
            found.append(Drafting("", "chain", parse_list(depth, "k", int, 1)[0]))
    trees = parse_list(nodes, "nodes", int, 1) if nodes else ()
    found += [Drafting("", "tree", size, lookup) for size in trees]
    return list(dict.fromkeys(found))

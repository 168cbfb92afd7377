"""`peagle bench`: throughput, latency and acceptance, method by method under the same load."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peagle.bench.summary import Cell, Result
from peagle.catalog import CHOICES, PARALLEL_METHODS
from peagle.cli import bench_engines
from peagle.cli.bench_engines import BenchPlan, EngineUnderTest
from peagle.cli.common import (
    EngineOption,
    ModelOptions,
    VllmPythonOption,
    console,
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


@app.command()
def run(
    target: str | None = None,
    *,
    methods: str = "none,eagle3,p-eagle",
    eagle3: str | None = None,
    p_eagle: str | None = None,
    k: str | None = None,
    nodes: str | None = None,
    lookup: Literal["on", "off", "on,off"] = "on",
    concurrency: str = "1",
    rate: float | None = None,
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
    lookup: Lookup in addition to a head, in trees and where drafts are chosen every round: on,
        off, or on,off to compare both.
    concurrency: Numbers of conversations in flight, separated by commas.
    rate: Conversations started per second, at random times; replaces --concurrency.
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
        named = _not_vllms(k, nodes, methods, model)
        chosen = resolve_engine(engine, vllm_python, named, model.device)
    if k is None and nodes is None:
        k = PINNED if chosen == "vllm" else ADAPTIVE
    settings = _settings(k, nodes, "off" if model.no_lookup else lookup)
    cells = _cells(methods, settings, concurrency, rate, temperature)
    workload = read_workload(dataset, limit)
    sampled = {"max_tokens": sampling.max_tokens, "ignore_eos": sampling.ignore_eos}
    about = {
        "target": target and model_name(target), "dtype": model.dtype, "quantize": model.quantize,
        "dataset": workload.name, "turns_sha256": workload.digest,
        "conversations": len(workload.conversations), **sampled, "rate": rate, "repeats": repeats,
    }  # fmt: skip
    plan = BenchPlan(target or "", {"eagle3": eagle3, "p-eagle": p_eagle}, model, sampled, cells)
    if url is not None:
        engine_under_test = bench_engines.server(plan, url, api_key, hardware)
    elif target is None:
        raise InputError("is missing", field="target", fix="name one, or a server with `url`")
    elif chosen == "vllm":
        engine_under_test = bench_engines.vllm(plan, vllm_python)
    else:
        engine_under_test = bench_engines.native(plan)
    _measure(engine_under_test, cells, workload.conversations, about, output)


def _measure(
    engine: EngineUnderTest,
    cells: list[Cell],
    conversations: list[list[str]],
    settings: dict[str, Any],
    output: Path,
) -> None:
    """Play every cell, write what was measured after each, and print it in the end."""
    from peagle.bench import report as pages
    from peagle.bench.run import Stopped, environment, play, report, write_json

    about = {**environment(engine.device), "settings": {**settings, "engine": engine.name}}
    here = f"{Path.cwd()}/"  # results do not name the clone's folder
    heads = {method: head.name.removeprefix(here) for method, head in engine.heads.items()}
    results = [Result(cell, heads.get(cell.drafting.method)) for cell in cells]
    loads = list(engine.loads(results, conversations, settings["repeats"]))

    def on_load() -> None:
        write_json(output, report(results, about))
        bar.advance(task)

    with progress_bar("loads", f"measured, each is in {output}") as bar, closing(engine):
        task = bar.add_task("", total=len(loads))
        try:
            play(loads, engine.opened, settings["rate"], on_load)
        except (Stopped, VllmFailed) as stopped:
            screen.print(f"[red]stopped:[/] {stopped}; what was measured is in {output}")
            raise typer.Exit(1) from stopped
    found = report(results, about)
    with writing(output):
        written = pages.write(found, output)
    title = f"{settings['target']}, {settings['dataset']}, {engine.device}"
    note = "nodes: draft tokens a round; TTFT and TPOT: medians in ms"
    print_table(rows_table(found["rows"], *COLUMNS, title=title, caption=note))
    console.print("written: " + ", ".join(map(str, [output, *written])))


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two measurements; exit code 1 when something is slower and the intervals do not
    overlap.

    before: JSON file that `peagle bench` wrote.
    after: JSON file of a later run with the same settings.
    """
    from peagle.bench.run import compare_files

    changes = compare_files(before, after)
    print_table(rows_table(changes, *COMPARED))
    if any(row["change"] == "slower" for row in changes):
        raise typer.Exit(1)


def _not_vllms(k: str | None, nodes: str | None, methods: str, model: ModelOptions) -> list[str]:
    """Options that were given and that vLLM may lack."""
    used = {
        "k adaptive": ADAPTIVE in (k or "").split(","),
        "nodes": nodes is not None,
        "methods lookup": "lookup" in methods.split(","),
        "device": model.device != "auto",
        "quantize": model.quantize is not None,
    }
    return [option for option, is_used in used.items() if is_used]


def _settings(k: str | None, nodes: str | None, lookup: str) -> list[Drafting]:
    """Every chain, and every tree with each kind of lookup, without a method."""
    kinds = [kind == "on" for kind in lookup.split(",")]
    found = list[Drafting]()
    for depth in k.split(",") if k else []:
        if depth == ADAPTIVE:
            found += [Drafting("", "auto", lookup=kind) for kind in kinds]
        else:
            found.append(Drafting("", "chain", parse_list(depth, "k", int, 1)[0]))
    trees = parse_list(nodes, "nodes", int, 1) if nodes else ()
    found += [Drafting("", "tree", size, kind) for size in trees for kind in kinds]
    return list(dict.fromkeys(found))


def _cells(
    methods: str, settings: list[Drafting], concurrency: str, rate: float | None, temperature: str
) -> list[Cell]:
    """Every method with every setting under every load, at every temperature."""
    chosen = methods.split(",")
    if wrong := [method for method in chosen if method not in CHOICES]:
        raise InputError(f"choose from {', '.join(CHOICES)}", field="methods", value=wrong[0])
    return [
        Cell(replace(setting, method=method), load, heat)
        for heat in parse_list(temperature, "temperature", float)
        for load in _loads(concurrency, rate)
        for method in dict.fromkeys(chosen)
        for setting in _of(method, settings)
    ]


def _of(method: str, settings: list[Drafting]) -> list[Drafting]:
    """The settings that a method can draft with."""
    if method == "none":
        return [Drafting()]
    if method == "lookup":
        trees = [replace(one, lookup=True) for one in settings if one.mode == "tree"]
        return list(dict.fromkeys(trees)) or [Drafting("", "auto", lookup=True)]
    if method in PARALLEL_METHODS:
        return settings
    possible = [setting for setting in settings if setting.mode != "tree" or setting.lookup]
    if not possible:
        fix = "give `k`, or leave `lookup` on"
        raise InputError(f"{method} alone drafts chains", field="nodes", fix=fix)
    return possible


def _loads(concurrency: str, rate: float | None) -> tuple[int, ...]:
    """Conversations at a time; 0: at random times."""
    if rate is None:
        return parse_list(concurrency, "concurrency", int, 1)
    if rate <= 0:
        raise InputError("must be above 0", field="rate", value=rate)
    return (0,)

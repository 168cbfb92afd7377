"""`peagle bench`: throughput, latency and acceptance, method by method under the same load."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.bench.run import compare_files, environment, make_cells, report, write_json
from peagle.bench.summary import Cell, Result
from peagle.catalog import model_name
from peagle.cli import common
from peagle.cli.measure import print_rows
from peagle.cli.options import App, Fields, group_with_default, parse_list
from peagle.engine.drafting import ADAPTIVE, Drafting
from peagle.engine.params import SamplingParams
from peagle.errors import InputError, check_at_least
from peagle.files import writing

if TYPE_CHECKING:
    from peagle.heads.find import Head

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
    target: str,
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
    model: Annotated[common.ModelOptions, MODEL],
    output: Path = Path("results/bench.json"),
) -> None:
    """Play a data set with every method, K, tree, concurrency and temperature, interleaved; write
    rows with 95 % intervals as JSON, and a page with plots next to it.

    methods: Drafting methods to compare, separated by commas.
    eagle3: EAGLE-3 head: a folder or hub id. Default: the catalog's.
    p_eagle: P-EAGLE head: a folder or hub id. Default: the catalog's.
    k: Numbers of draft tokens per round, separated by commas; adaptive chooses every round.
        Default: adaptive; none where --nodes is given.
    nodes: Numbers of draft tokens per round as a tree, separated by commas.
    concurrency: Numbers of conversations in flight, separated by commas.
    dataset: Prompts: humaneval, a JSONL or Parquet file, or a hub id.
    limit: Number of conversations to use. Default: all.
    temperature: Sampling temperatures, separated by commas; 0 is greedy decoding.
    repeats: Number of measurements of each cell, interleaved with the others.
    output: JSON file to write the results to.
    """
    from peagle.bench import report as pages
    from peagle.bench.native import Player, device_name, play
    from peagle.bench.workload import read_workload
    from peagle.model.fingerprints import template_hash

    check_at_least(1, repeats=repeats, limit=limit)
    pages.check(output)  # before hours of measuring
    common.check_file(output)
    users = parse_list(concurrency, "concurrency", int, 1)
    heats = parse_list(temperature, "temperature", float)
    settings = _settings(k, nodes, not model.no_lookup)
    cells = make_cells(methods.split(","), settings, users, heats)
    workload = read_workload(dataset, limit)
    _check(cells, sampling, len(workload.conversations))
    heads = _heads(target, {"eagle3": eagle3, "p-eagle": p_eagle}, cells)
    llm = common.open_llm(target, replace(model, method="none"))
    about = {
        "target": model_name(target), "dtype": model.dtype, "quantize": model.quantize,
        "chat_template": model.chat_template and template_hash(llm.target),
        "dataset": workload.name, "turns_sha256": workload.digest,
        "conversations": len(workload.conversations), "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos, "repeats": repeats, "engine": "native",
    }  # fmt: skip
    drafters = {m: llm.load_head(head.folder, force=model.force) for m, head in heads.items()}

    def opened(cell: Cell, seed: int) -> Player:
        drafter = drafters.get(cell.drafting.method)
        used = llm.use(drafter, **cell.drafting.options, max_batch=cell.concurrency)
        return Player(used, replace(sampling, temperature=cell.temperature, seed=seed))

    here = f"{Path.cwd()}/"  # results do not name the clone's folder
    names = {method: head.name.removeprefix(here) for method, head in heads.items()}
    results = [Result(cell, names.get(cell.drafting.method)) for cell in cells]
    found = {**environment(device_name(llm.target.device)), "settings": about}

    def on_load() -> None:
        write_json(output, report(results, found))
        bar.advance(task)

    try:
        with common.progress_bar("loads", "measured") as bar:
            task = bar.add_task("", total=len(results) * repeats)
            play(results, [(0, workload.conversations)] * repeats, opened, on_load)
    finally:  # of a run that is cut short, what it has measured
        if any(result.repeats for result in results):
            _show(report(results, found), output)


def _check(cells: list[Cell], sampling: SamplingParams, conversations: int) -> None:
    """Raises InputError, before anything is loaded, for a cell that cannot be played."""
    from peagle.methods.registry import METHODS

    for cell in cells:
        Drafting.resolve(METHODS.get(cell.drafting.method), **cell.drafting.options)
        replace(sampling, temperature=cell.temperature)
        if cell.concurrency > conversations:
            why = f"is more than the {conversations} conversations"
            raise InputError(why, field="concurrency", value=cell.concurrency, fix="lower it")


def _heads(target: str, named: dict[str, str | None], cells: list[Cell]) -> dict[str, "Head"]:
    """The head of every method that drafts by one: as named, or the catalog's."""
    from peagle.heads.find import find_head

    methods = dict.fromkeys(cell.drafting.method for cell in cells)
    found = {m: find_head(target, named.get(m), m, field=m.replace("-", "_")) for m in methods}
    return {method: head for method, head in found.items() if head}


def _show(found: dict[str, Any], output: Path) -> None:
    """Write the page of a measurement, and print its table."""
    from peagle.bench import report as pages

    with writing(output):
        page = pages.write(found, output)
    settings = found["settings"]
    title = f"{settings['target']}, {settings['dataset']}, {found['device']}"
    note = "nodes: draft tokens a round; TTFT and TPOT: medians in ms"
    print_rows(found["rows"], *COLUMNS, title=title, caption=note)
    common.console.print(f"written: {output}, {page}")


@app.command()
def compare(before: Path, after: Path) -> None:
    """Compare two measurements; exit code 1 when something is slower and the intervals do not
    overlap.

    before: JSON file that `peagle bench` wrote.
    after: JSON file of a later run with the same settings.
    """
    changes = compare_files(before, after)
    print_rows(changes, *COMPARED)
    if any(row["change"] == "slower" for row in changes):
        raise typer.Exit(1)


def _settings(k: str | None, nodes: str | None, lookup: bool) -> list[Drafting]:
    """Every chain and every tree, without a method; the budget's choice where none is named."""
    if not (k or nodes):
        k = ADAPTIVE
    parts = k.split(",") if k else []
    depths = [None if part == ADAPTIVE else parse_list(part, "k", int, 1)[0] for part in parts]
    trees = parse_list(nodes, "nodes", int, 1) if nodes else ()
    found = [Drafting("", depth, lookup=lookup and depth is None) for depth in depths]
    found += [Drafting("", None, size, lookup) for size in trees]
    return list(dict.fromkeys(found))

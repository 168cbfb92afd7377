"""`peagle bench`: throughput, latency and acceptance, method by method under the same load."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from peagle.cli.common import (
    METHODS,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    QuantizeOption,
    parse_list,
    progress_bar,
    screen,
)
from peagle.cli.generate import console
from peagle.config import InputError

ADAPTIVE = "adaptive"


class _RunByDefault(TyperGroup):
    """`peagle bench TARGET` is `peagle bench run TARGET`."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["run", *args])


app = typer.Typer(cls=_RunByDefault, help="Measure methods under load; compare two measurements.")


@app.command()
def run(
    target: Annotated[
        str | None,
        typer.Argument(help="Folder, hub id, .gguf file, catalog name; or what --url serves."),
    ] = None,
    methods: Annotated[str, typer.Option(help="Of none, eagle3, p-eagle.")] = "none,eagle3,p-eagle",
    eagle3: Annotated[str | None, typer.Option(help="Head. Default: the catalog's.")] = None,
    p_eagle: Annotated[str | None, typer.Option(help="Head. Default: the catalog's.")] = None,
    k: Annotated[
        str, typer.Option(help="Draft tokens a round: 3,7; adaptive: as many as pay.")
    ] = ADAPTIVE,
    concurrency: Annotated[str, typer.Option(help="Conversations at a time: 1,8.")] = "1",
    rate: Annotated[
        float | None, typer.Option(help="Instead: conversations a second, at random times.")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="humaneval, a JSONL or Parquet file, a folder of them, or a hub id.")
    ] = "humaneval",
    limit: Annotated[int | None, typer.Option(help="First N conversations only.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every answer is --max-tokens long.")
    ] = False,
    temperature: Annotated[str, typer.Option(help="One or more: 0,1.")] = "0",
    repeats: Annotated[int, typer.Option(help="Of every cell, interleaved.")] = 3,
    url: Annotated[
        str | None, typer.Option(help="A server's base URL instead: http://host:8000/v1.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="PEAGLE_API_KEY", help="For --url.")] = None,
    hardware: Annotated[str | None, typer.Option(help="What --url runs on.")] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="TARGET's shape, random weights, given acceptance."),
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(help="With --random-weights.")] = 512,
    acceptance: Annotated[
        str, typer.Option(help="With --random-weights: acceptance lengths at K = 7.")
    ] = "p-eagle=3.94,eagle3=3.03",
    chat_template: ChatTemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    quantize: QuantizeOption = None,
    force: ForceOption = False,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/bench.json"),
) -> None:
    """Play a data set with every method, K, concurrency and temperature, interleaved; write rows
    with 95 % intervals as JSON, and a page with plots beside it."""
    from peagle.bench import report as pages
    from peagle.bench.run import Stopped, environment, report, write_json
    from peagle.bench.run import run as play
    from peagle.bench.summary import Result
    from peagle.bench.workload import Workload, read_workload

    pages.check()
    load: dict[str, Any] = {"repeats": repeats, "max_tokens": max_tokens, "limit": limit or 1}
    if random_weights:
        load["prompt_tokens"] = prompt_tokens
    for name, value in load.items():
        if value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if rate is not None and rate <= 0:
        raise InputError(f"--rate {rate}: must be above 0")
    loads = [0] if rate is not None else parse_list(concurrency, "--concurrency", least=1)
    cells = _cells(methods, k, loads, temperature)
    if random_weights:
        count = limit or 16
        workload = Workload("random ids", [[f"prompt {i}"] for i in range(count)])
    else:
        workload = read_workload(dataset, limit)
    settings = {
        "target": target, "dtype": dtype, "quantize": quantize, "dataset": workload.name,
        "turns_sha256": workload.digest, "conversations": len(workload.conversations),
        "max_tokens": max_tokens, "ignore_eos": ignore_eos or random_weights, "rate": rate,
        "repeats": repeats, "synthetic": random_weights,
    }  # fmt: skip
    sampled = {"max_tokens": max_tokens, "ignore_eos": settings["ignore_eos"]}
    if url is not None:
        where, opened, heads = _server(target, url, api_key, hardware, sampled, cells)
    elif target is None:
        raise InputError("TARGET: name a target, or a server with --url")
    elif random_weights:
        settings |= {"prompt_tokens": prompt_tokens, "acceptance": acceptance}
        where, opened, heads = _synthetic(target, device, sampled, prompt_tokens, acceptance, cells)
    else:
        named = {"eagle3": eagle3, "p-eagle": p_eagle}
        options = {"dtype": dtype, "device": device, "quantize": quantize, "force": force}
        options["chat_template"] = chat_template
        where, opened, heads = _native(target, named, options, sampled, cells)
    about = {**environment(where["device"]), "settings": {**settings, "engine": where["engine"]}}
    results = [Result(cell, heads.get(cell.method)) for cell in cells]
    with progress_bar("loads") as bar:
        task = bar.add_task("", total=len(cells) * repeats)
        write = lambda done, whole: write_json(output, report(done, about, whole))  # noqa: E731
        try:
            play(results, opened, workload.conversations, repeats, rate, write,
                 lambda cell: bar.advance(task))  # fmt: skip
        except Stopped as stopped:
            screen.print(f"[red]stopped:[/] {stopped}; what was measured is in {output}")
            raise typer.Exit(1) from stopped
    found = report(results, about, True)
    written = pages.write(found, output)
    console.print(_table(found))
    console.print("written: " + ", ".join(map(str, [output, *written])))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="JSON of `peagle bench`.")],
    after: Annotated[Path, typer.Argument(help="Another, under the same settings.")],
) -> None:
    """What has become slower or faster between two measurements; exit 1 when something is slower
    and the intervals do not overlap."""
    from peagle.bench.compare import compare_files

    changes = compare_files(before, after)
    table = Table("method", "K", "load", "t", "before", "after", "ratio", "")
    for change in changes:
        table.add_row(*change.row())
    console.print(table)
    if any(change.slower for change in changes):
        raise typer.Exit(1)


def _cells(methods: str, k: str, loads: list[int], temperature: str) -> list[Any]:
    from peagle.bench.summary import Cell

    chosen = methods.split(",")
    if wrong := [method for method in chosen if method not in METHODS]:
        raise InputError(f"--methods {wrong[0]!r}: choose from {', '.join(METHODS)}")
    depths = [d if d == ADAPTIVE else parse_list(d, "--k", least=1)[0] for d in k.split(",")]
    try:
        heats = [float(part) for part in temperature.split(",")]
    except ValueError as error:
        why = "expected numbers separated by commas"
        raise InputError(f"--temperature {temperature!r}: {why}") from error
    if min(heats) < 0:
        raise InputError(f"--temperature {temperature!r}: each must be at least 0")
    return [
        Cell(method, depth, load, heat)
        for heat in heats
        for load in loads
        for method in dict.fromkeys(chosen)
        for depth in ([0] if method == "none" else dict.fromkeys(depths))
    ]


# What answers: where it runs, how a cell's answers are asked for, and heads by method.
Answering = tuple[dict[str, str], Callable[..., AbstractAsyncContextManager[Any]], dict[str, str]]


def _native(
    target: str,
    named: dict[str, str | None],
    options: dict[str, Any],
    sampled: dict[str, Any],
    cells: list[Any],
) -> Answering:
    """The engine in this process; all heads stay loaded."""
    from peagle.bench.native import Native
    from peagle.bench.side_by_side import device_name
    from peagle.catalog import head_place
    from peagle.cli.common import open_llm
    from peagle.engine.request import SamplingParams
    from peagle.model.checkpoint import find_head
    from peagle.model.drafter import Drafter
    from peagle.model.packed import pack

    heads = dict[str, str]()
    for method in {cell.method for cell in cells} - {"none"}:
        place = named[method] or head_place(target, method)
        if place is None:
            raise InputError(f"no {method} head is known for {target}: name one with --{method}")
        heads[method] = str(place)
    folders = {method: find_head(place) for method, place in heads.items()}
    force = options.pop("force")
    llm = open_llm(target, None, "none", None, **options)
    drafters: dict[str, Any] = {"none": None}
    for method, folder in folders.items():
        drafters[method] = pack(Drafter.load(folder, llm.target, force=force))
        if (found := drafters[method].config.method) != method:
            raise InputError(f"--{method} {heads[method]}: is a {found} head")

    def opened(cell: Any) -> Native:
        llm.max_batch = cell.concurrency or 16
        llm.use(drafters[cell.method], None if cell.k in (0, ADAPTIVE) else cell.k)
        return Native(llm, SamplingParams(temperature=cell.temperature, seed=0, **sampled))

    return {"device": device_name(), "engine": "native"}, opened, heads


def _synthetic(
    target: str,
    device: str,
    sampled: dict[str, Any],
    prompt_tokens: int,
    acceptance: str,
    cells: list[Any],
) -> Answering:
    from peagle.bench.side_by_side import device_name
    from peagle.bench.synthetic import Synthetic, profile, random_drafter, random_target
    from peagle.engine.llm import LLM
    from peagle.engine.request import SamplingParams
    from peagle.model.source import check_device

    check_device(device)
    try:
        given = {m: float(a) for m, a in (part.split("=") for part in acceptance.split(","))}
    except ValueError as error:
        raise InputError(f"--acceptance {acceptance!r}: expected p-eagle=3.9,eagle3=3.0") from error
    wanted = {cell.method for cell in cells} - {"none"}
    if missing := sorted(wanted - given.keys()):
        raise InputError(f"--acceptance {acceptance!r}: says nothing of {missing[0]}")
    if any(cell.k == ADAPTIVE or cell.temperature for cell in cells):
        raise InputError("--random-weights: pin --k, and leave --temperature at 0")
    with screen.status(f"drawing weights of {target}"):
        drawn = random_target(target, device)
        drafters: dict[str, Any] = {"none": None}
        drafters |= {method: random_drafter(drawn, method) for method in wanted}
    llm = LLM(drawn, kv_tokens=max(c.concurrency for c in cells)
              * (prompt_tokens + sampled["max_tokens"] + 64))  # fmt: skip
    accepted = {method: profile(length) for method, length in given.items()}

    def opened(cell: Any) -> Synthetic:
        llm.max_batch = cell.concurrency
        llm.use(drafters[cell.method], cell.k or None)
        profiled = accepted.get(cell.method, [])
        return Synthetic(llm, SamplingParams(**sampled), prompt_tokens, profiled)

    named = {method: f"random, acceptance length {given[method]} at K = 7" for method in wanted}
    return {"device": device_name(), "engine": "native"}, opened, named


def _server(
    model: str | None,
    url: str,
    api_key: str | None,
    hardware: str | None,
    sampled: dict[str, Any],
    cells: list[Any],
) -> Answering:
    """Somebody's server: its method and K are what it was started with."""
    from peagle.bench.client import Server, served_model

    if len({(cell.method, cell.k) for cell in cells}) > 1:
        why = "a server has one: name it (--methods p-eagle --k 7)"
        raise InputError(f"--url {url}: several methods or K, {why}")
    named = model or served_model(url, api_key)

    def opened(cell: Any) -> Server:
        body = {"model": named, "temperature": cell.temperature, "seed": 0, **sampled}
        return Server(url, body, api_key)

    return {"device": hardware or "not told (--hardware)", "engine": url}, opened, {}


def _table(report: dict[str, Any]) -> Table:
    title = f"{report['settings']['target']}, {report['settings']['dataset']}, {report['device']}"
    columns = ("method", "K", "load", "tok/s", "×", "95 %", "AL", "TTFT", "TPOT", "same")
    table = Table(*columns, title=title, caption="TTFT and TPOT: medians in ms")
    for row in report["rows"]:
        length, speed_up, edges = (
            row.get(name) for name in ("acceptance_length", "speed_up", "speed_up_95")
        )
        load = f"c = {row['concurrency']}" if row["concurrency"] else "random"
        table.add_row(
            row["method"],
            str(row["k"] or "-"),
            f"{load}, t = {row['temperature']:g}" if row["temperature"] else load,
            f"{row['output_tps']:.1f}",
            f"{speed_up:.2f}" if speed_up else "-",
            f"{edges[0]:.2f}–{edges[1]:.2f}" if edges else "-",
            f"{length:.2f}" if length else "-",
            f"{row['ttft_ms_p50'] or 0:.0f}",
            f"{row['tpot_ms_p50'] or 0:.1f}",
            f"{row['same']}/{row['compared']}" if "same" in row else "-",
        )
    return table

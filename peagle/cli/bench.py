"""`peagle bench`: throughput, latency and acceptance, method by method under the same load."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from peagle.catalog import CHOICES
from peagle.cli.bench_answering import ADAPTIVE
from peagle.cli.common import (
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    MaxTokensOption,
    QuantizeOption,
    parse_list,
    progress_bar,
    screen,
)
from peagle.cli.engines import VLLM_DEVICES, EngineOption, VllmPythonOption, resolve_engine
from peagle.cli.generate import console
from peagle.errors import InputError
from peagle.model.loader import resolve_device
from peagle.vllm.process import VllmFailed

PINNED = "7"  # draft tokens per round where K cannot be chosen every round


class _RunByDefault(TyperGroup):
    """`peagle bench TARGET` is `peagle bench run TARGET`."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else ["run", *args])


app = typer.Typer(
    cls=_RunByDefault,
    add_completion=False,
    help="Measure drafting methods under load, and compare measurements (`bench TARGET` is short "
    "for `bench run TARGET`).",
)


@app.command()
def run(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Target model: a folder, a hub id, a .gguf file or a catalog name. With --url, "
            "the model's name there."
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Drafting methods to compare, separated by commas.")
    ] = "none,eagle3,p-eagle",
    eagle3: Annotated[
        str | None, typer.Option(help="EAGLE-3 head: a folder or hub id. Default: the catalog's.")
    ] = None,
    p_eagle: Annotated[
        str | None, typer.Option(help="P-EAGLE head: a folder or hub id. Default: the catalog's.")
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            help="Numbers of draft tokens per round, separated by commas; adaptive chooses every "
            "round. Default: adaptive; 7 with vllm or --random-weights."
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Numbers of conversations in flight, separated by commas.")
    ] = "1",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Conversations started per second, at random times; replaces --concurrency."
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="Prompts: humaneval, a JSONL or Parquet file, a folder of them, or a hub id."
        ),
    ] = "humaneval",
    limit: Annotated[
        int | None, typer.Option(help="Number of conversations to use. Default: all.")
    ] = None,
    max_tokens: MaxTokensOption = 256,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Generate --max-tokens tokens even after end of text."),
    ] = False,
    temperature: Annotated[
        str, typer.Option(help="Sampling temperatures, separated by commas; 0 is greedy decoding.")
    ] = "0",
    repeats: Annotated[
        int, typer.Option(help="Number of measurements of each cell, interleaved with the others.")
    ] = 3,
    engine: EngineOption = "auto",
    vllm_python: VllmPythonOption = None,
    url: Annotated[
        str | None,
        typer.Option(help="Base URL of a running server to measure, as http://host:8000/v1."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PEAGLE_API_KEY", help="API key of the server at --url."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Hardware of the server at --url, for the report.")
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Draw random weights of TARGET's shape and simulate the --acceptance.",
        ),
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of each prompt in tokens, with --random-weights.")
    ] = 512,
    acceptance: Annotated[
        str,
        typer.Option(help="Acceptance length of each method at K = 7, with --random-weights."),
    ] = "p-eagle=3.94,eagle3=3.03",
    pass_at_1: Annotated[
        bool,
        typer.Option("--pass-at-1", help="Run HumanEval's tests on the answers, in a sandbox."),
    ] = False,
    chat_template: ChatTemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    force: ForceOption = False,
    output: Annotated[Path, typer.Option(help="JSON file to write the results to.")] = Path(
        "results/bench.json"
    ),
) -> None:
    """Play a data set with every method, K, concurrency and temperature, interleaved; write rows
    with 95 % intervals as JSON, and a page with plots beside it."""
    from peagle.bench import sandbox
    from peagle.bench.run import Stopped, environment, report, write_json
    from peagle.bench.run import run as play
    from peagle.bench.summary import Result
    from peagle.bench.workload import random_ids, read_workload
    from peagle.cli import bench_answering as answering

    judged = "random ids" if random_weights else dataset
    _check_tools(judged if pass_at_1 else None)
    _at_least_one(repeats=repeats, max_tokens=max_tokens, limit=limit, prompt_tokens=prompt_tokens)
    chosen = "native"
    if url is None and not random_weights:
        chosen = resolve_engine(engine, vllm_python, _native_only(k, device, quantize), device)
    k = k or (PINNED if chosen == "vllm" or random_weights else ADAPTIVE)
    cells = _cells(methods, k, _loads(concurrency, rate), temperature)
    workload = random_ids(limit or 16) if random_weights else read_workload(dataset, limit)
    sampled = {"max_tokens": max_tokens, "ignore_eos": ignore_eos or random_weights}
    settings = {
        "target": target, "dtype": dtype, "quantize": quantize, "dataset": workload.name,
        "turns_sha256": workload.digest, "conversations": len(workload.conversations),
        **sampled, "rate": rate, "repeats": repeats, "synthetic": random_weights,
    }  # fmt: skip
    if url is not None:
        answers = answering.server(target, url, api_key, hardware, sampled, cells)
    elif target is None:
        raise InputError("TARGET: name a target, or a server with --url")
    elif random_weights:
        settings |= {"prompt_tokens": prompt_tokens, "acceptance": acceptance}
        answers = answering.synthetic(target, device, sampled, prompt_tokens, acceptance, cells)
    else:
        options = {"dtype": dtype, "device": device, "quantize": quantize, "force": force}
        options["chat_template"] = chat_template
        named = {"eagle3": eagle3, "p-eagle": p_eagle}
        if chosen == "vllm":
            answers = answering.vllm(target, named, options, vllm_python, sampled, cells)
        else:
            options["device"] = resolve_device(device)
            answers = answering.native(target, named, options, sampled, cells)
    about = {**environment(answers.device), "settings": {**settings, "engine": answers.engine}}
    results = [Result(cell, _from_here(answers.heads.get(cell.method))) for cell in cells]
    write = lambda done, whole: write_json(output, report(done, about, whole))  # noqa: E731
    with progress_bar("loads") as bar, closing(answers):
        task = bar.add_task("", total=len(cells) * repeats)
        try:
            play(answers.groups(results), answers.opened, workload.conversations, repeats, rate,
                 write, lambda cell: bar.advance(task))  # fmt: skip
        except (Stopped, VllmFailed) as stopped:
            screen.print(f"[red]stopped:[/] {stopped}; what was measured is in {output}")
            raise typer.Exit(1) from stopped
    found = report(results, about, True)
    if pass_at_1:
        with screen.status("running the answers"):
            sandbox.judge(results, found["rows"])
        write_json(output, found)
    _show(found, output)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="JSON file that `peagle bench` wrote.")],
    after: Annotated[Path, typer.Argument(help="JSON file of a later run with the same settings.")],
) -> None:
    """Compare two measurements; exit code 1 when something is slower and the intervals do not
    overlap."""
    from peagle.bench.compare import compare_files

    changes = compare_files(before, after)
    table = Table("method", "K", "load", "t", "before", "after", "ratio", "")
    for change in changes:
        table.add_row(*change.row())
    console.print(table)
    if any(change.slower for change in changes):
        raise typer.Exit(1)


def _check_tools(judged: str | None) -> None:
    """Raises InputError, before hours of measuring, for what the report or the tests of the data
    set `judged` lack on this machine."""
    from peagle.bench import report, sandbox

    report.check()
    if judged is not None:
        sandbox.check(judged)


def _native_only(k: str | None, device: str, quantize: str | None) -> list[str]:
    """Options that were given and that vLLM lacks."""
    given = {
        "--k adaptive": ADAPTIVE in (k or "").split(","),
        f"--device {device}": device not in VLLM_DEVICES,
        "--quantize": quantize is not None,
    }
    return [option for option, asked in given.items() if asked]


def _show(found: dict[str, Any], output: Path) -> None:
    from peagle.bench import report as pages

    written = pages.write(found, output)
    console.print(_table(found))
    console.print("written: " + ", ".join(map(str, [output, *written])))


def _at_least_one(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def _from_here(head: str | None) -> str | None:
    """A folder below this one by its path from here: a result need not say where a clone lies."""
    inside = head is not None and Path(head).is_relative_to(Path.cwd())
    return str(Path(head).relative_to(Path.cwd())) if head and inside else head


def _loads(concurrency: str, rate: float | None) -> list[int]:
    """Conversations at a time; 0: at random times."""
    if rate is None:
        return parse_list(concurrency, "--concurrency", least=1)
    if rate <= 0:
        raise InputError(f"--rate {rate}: must be above 0")
    return [0]


def _cells(methods: str, k: str, loads: list[int], temperature: str) -> list[Any]:
    from peagle.bench.summary import Cell

    chosen = methods.split(",")
    if wrong := [method for method in chosen if method not in CHOICES]:
        raise InputError(f"--methods {wrong[0]!r}: choose from {', '.join(CHOICES)}")
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


def _table(report: dict[str, Any]) -> Table:
    title = f"{report['settings']['target']}, {report['settings']['dataset']}, {report['device']}"
    columns = ("method", "K", "load", "tok/s", "×", "95 %", "AL", "TTFT", "TPOT", "same")
    solved = any("pass_at_1" in row for row in report["rows"])
    table = Table(*columns, *(["pass@1"] if solved else []), title=title,
                  caption="TTFT and TPOT: medians in ms")  # fmt: skip
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
            f"{row['same']}/{row['compared']}" if "same" in row else _chance(row),
            *([f"{row['pass_at_1']:.1%}"] if solved else []),
        )
    return table


def _chance(row: dict[str, Any]) -> str:
    return "-" if row.get("same_p") is None else f"p = {row['same_p']:.2f}"

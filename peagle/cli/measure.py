"""`peagle eval` and `peagle demo`: a head on a file of prompts, and all methods on the demo target.

Their tables, and the one of `bench`, have columns of the same rows.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peagle.bench.run import environment, report, write_json
from peagle.bench.summary import Cell, doubt
from peagle.cli import common
from peagle.cli.options import Fields, parse_list
from peagle.engine.drafting import Drafting
from peagle.engine.params import SamplingParams
from peagle.errors import InputError, check_at_least

CHAINS = "3,7"
MODEL = Fields(
    "head", "method", "no_lookup", "chat_template", "dtype", "device", "quantize", "force"
)
EVAL = (
    "dataset", "drafts", "nodes", "acceptance length", "per position", "tokens / forward",
    "rounds", "output tokens",
)  # fmt: skip
DEMO_TARGET = "smollm2-135m"
DEMO_DTYPE = "bfloat16"
DEMO = ("method", "nodes", "tok/s", "×", "95 %", "tokens / forward", "per position")
COLUMNS = {  # heading: a field of the row, and its form; others are shown as they are
    "tok/s": ("output_tps", "{:.1f}"),
    "before": ("before", "{:.1f}"),
    "after": ("output_tps", "{:.1f}"),
    "ratio": ("ratio", "{:.2f}"),
    "×": ("speed_up", "{:.2f}"),
    "95 %": ("speed_up_95", "{0[0]:.2f}–{0[1]:.2f}"),
    "nodes": ("nodes", "{:.1f}"),
    "AL": ("acceptance_length", "{:.2f}"),
    "acceptance length": ("acceptance_length", "{:.2f}"),
    "tokens / forward": ("tokens_per_forward", "{:.2f}"),
    "TTFT": ("ttft_ms_p50", "{:.0f}"),
    "TPOT": ("tpot_ms_p50", "{:.1f}"),
}


def evaluate(
    target: str,
    *,
    dataset: Path,
    k: str | None = None,
    nodes: str | None = None,
    limit: int | None = None,
    model: Annotated[common.ModelOptions, MODEL],
    sampling: Annotated[SamplingParams, Fields("temperature", max_tokens=512)],
    no_timing: bool = False,
    as_json: common.JsonOption = False,
) -> None:
    """Measure acceptance length and per-position acceptance, all turns, with the chat template;
    then time a few prompts with and without the head.

    dataset: JSONL or Parquet file of {"turns": [...]} or conversations.
    k: Numbers of draft tokens per round to measure, separated by commas. Default: 3,7; none where
        --nodes is given.
    nodes: The same of draft trees, with lookup unless --no-lookup is given.
    limit: Number of records to use. Default: all.
    no_timing: Do not time the target with and without the head; no verdict is given.
    """
    from peagle.bench.native import measure_acceptance, time_head, verdict
    from peagle.data.dataset import read_prompts

    check_at_least(1, limit=limit)
    params = replace(sampling, seed=0)
    prompts = read_prompts(dataset)[:limit]
    chains = parse_list(k or CHAINS, "k", int, 1) if k or not nodes else ()
    trees = parse_list(nodes, "nodes", int, 1) if nodes else ()
    first = chains[0] if k else None  # without a head it is refused, as by other commands
    llm = common.open_llm(target, replace(model, k=first))
    if llm.drafter is None and not (llm.drafting.lookup and trees):
        fix = "name one, or give `nodes` to measure lookup"
        raise InputError(f"{target} has none to measure", field="head", fix=fix)
    used = [llm.use(llm.drafter, depth) for depth in chains if llm.drafter]
    used += [llm.use(llm.drafter, nodes=size, lookup=not model.no_lookup) for size in trees]
    rows = list[dict[str, Any]]()
    with common.progress_bar("turns", "answered") as bar:
        task = bar.add_task("", total=len(used) * sum(map(len, prompts)))
        while used:  # nothing keeps an LLM, whose engine has its share of memory, after its turn
            row = measure_acceptance(used.pop(0), prompts, params, lambda n: bar.advance(task, n))
            rows.append({"dataset": dataset.stem, **row})
    most = max(rows, key=lambda row: row["skipped_turns"])
    if most["skipped_turns"]:
        common.warn(f"{most['skipped_turns']} turns left out, the first by: {most['error']}")
    judged = None
    if not no_timing:
        with common.screen.status("timing the target with and without the head"):
            timings = time_head(llm, rows, prompts, params)
        judged = verdict(timings) if timings else None
    if as_json:
        typer.echo(json.dumps({"rows": rows, "verdict": judged}, indent=1))
        return
    print_rows(rows, *EVAL)
    if judged is not None:
        common.console.print(judged["sentence"])


def demo(
    *,
    prompts: int = 8,
    sampling: Annotated[SamplingParams, Fields(max_tokens=128)],
    output: Path = Path("results/demo.json"),
) -> None:
    """Decode HumanEval prompts three ways, interleaved, greedy, and compare speed and tokens.

    prompts: HumanEval prompts to answer.
    output: JSON file to write.
    """
    from transformers.utils import logging

    from peagle.bench.native import device_name, side_by_side
    from peagle.bench.workload import human_eval
    from peagle.engine.llm import LLM
    from peagle.heads.find import find_head

    check_at_least(1, prompts=prompts)
    logging.disable_progress_bar()
    ways = [Drafting(method, None, lookup=True) for method in ("eagle3", "p-eagle")]
    heads = {way: find_head(DEMO_TARGET, method=way.method) for way in ways}
    common.check_file(output)
    questions = human_eval()[-prompts:]  # each K was chosen on the first ones
    doing = f"loading {DEMO_TARGET} (the first time it is downloaded and de-quantised)"
    with common.screen.status(doing):
        # The native engine is hardly tried on GPUs, and the demo is for every machine.
        llm = LLM(DEMO_TARGET, max_batch=1, deterministic=True, device="cpu", dtype=DEMO_DTYPE)
        drafters = {way: llm.load_head(head.folder) for way, head in heads.items() if head}
    with common.progress_bar("answers") as bar:
        task = bar.add_task("", total=len(questions) * (1 + len(drafters)))
        measured = side_by_side(llm, drafters, questions, sampling, lambda: bar.advance(task))
    device = device_name(llm.target.device)
    settings = {
        "target": DEMO_TARGET, "dtype": DEMO_DTYPE, "quantize": None, "dataset": "humaneval",
        "max_tokens": sampling.max_tokens, "repeats": 1, "engine": "native",
    }  # fmt: skip
    found = report(measured, {**environment(device), "settings": settings})
    write_json(output, found)
    load = f"{DEMO_TARGET}, {DEMO_DTYPE}, greedy, {len(questions)} HumanEval prompts, {device}"
    common.console.print(load)
    print_rows(found["rows"], *DEMO)
    same = all(row.get("same") in (None, len(questions)) for row in found["rows"])
    common.console.print(f"token ids identical: {'yes' if same else 'NO'}    written: {output}")
    if not same:
        raise typer.Exit(1)


def print_rows(rows: list[dict[str, Any]], *headings: str, **about: Any) -> None:
    """Print a table with some of the columns; "-" stands where nothing was measured. A speed-up
    that cannot be right is left out, and a line says why."""
    table = Table(*headings, **about)
    doubts = [doubt(row) for row in rows]
    for row, why in zip(rows, doubts, strict=True):
        shown = row | _texts(row) | ({"speed_up": None, "speed_up_95": None} if why else {})
        table.add_row(*(_cell(heading, shown) for heading in headings))
    common.print_table(table)
    for why in filter(None, doubts):
        common.warn(why)


def _cell(heading: str, row: dict[str, Any]) -> str:
    field, form = COLUMNS.get(heading, (heading.replace(" ", "_"), "{}"))
    value = row.get(field)
    return "-" if value is None else form.format(value)


def _texts(row: dict[str, Any]) -> dict[str, str]:
    """Values that are made of several fields."""
    cell = Cell.from_row(row)
    shares = " ".join(f"{share:.2f}" for share in row["accepted_per_position"])
    texts = {"drafts": str(cell.drafting), "load": cell.load, "per_position": shares}
    if "same" in row:
        texts["same"] = f"{row['same']}/{row['compared']}"
    return texts

"""Write the tables of README.md and docs/ from benchmarks/results/ and peagle/catalog.yaml.

    python benchmarks/tables.py

Where a result is missing, or its run was cut short, its table is left out.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle.catalog import load_catalog
from peagle.engine.drafting import Drafting

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
END = "<!-- end of tables -->"
NAMES = {"none": "the target alone", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}
TITLES = {
    "humaneval": "HumanEval",
    "mt-bench": "MT-Bench, both turns",
    "edits": "Edits: a file of 60 lines with one variable renamed",
}
PARTS = {
    "float32": "float32, greedy",
    "float32-sampled": "float32, sampled",
    "exact": "bf16, batch-invariant, greedy",
    "exact-sampled": "bf16, batch-invariant, sampled",
}

Lines = list[str]
Report = dict[str, Any]


def table(head: list[str], rows: list[list[object]]) -> Lines:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def where(report: Report, *settings: str) -> str:
    """Device and settings, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    given = "; ".join(f"{name.replace('_', ' ')} {report['settings'][name]}" for name in settings)
    return f"{report['device']}; {versions}{'; ' + given if given else ''}."


def times(ratio: float, edges: list[float] | None) -> str:
    """A ratio of speeds with its 95 % interval."""
    return f"{ratio:.2f} ×" + (f" ({edges[0]:.2f}–{edges[1]:.2f})" if edges else "")


def length(row: Report) -> str:
    """Acceptance length; a dash without drafts."""
    return f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "–"


def acceptance(report: Report) -> Lines:
    """Acceptance length by data set, K and head."""
    found = report["rows"]
    depths = sorted({row["k"] for row in found})
    rows: list[list[object]] = []
    for dataset, method in dict.fromkeys((row["dataset"], row["method"]) for row in found):
        mine = {r["k"]: r for r in found if (r["dataset"], r["method"]) == (dataset, method)}
        longest = mine[depths[0]]["settings"]["max_tokens"]
        lengths = [length(mine[k]) for k in depths]
        rows.append([f"{dataset}, at most {longest} tokens", NAMES[method], *lengths])
    about = "Acceptance length (1 + accepted draft tokens a round), chat template, greedy, bf16:"
    return [about, "", *table(["", "", *(f"K = {k}" for k in depths)], rows)]


def by_drafts(report: Report) -> Lines:
    """Acceptance by data set, head and drafts, with intervals."""

    def shown(row: Report, name: str) -> str:
        low, high = row[f"{name}_95"]
        return f"{row[name]:.2f} ({low:.2f}–{high:.2f})"

    rows: list[list[object]] = []
    for row in report["rows"]:
        drafts = Drafting.from_row(row)
        settings = row["settings"]
        asked = f"{row['dataset']}, {settings['conversations']} × at most {settings['max_tokens']}"
        figures = [shown(row, name) for name in ("acceptance_length", "tokens_per_forward")]
        rows.append([asked, NAMES[row["method"]], drafts, *figures])
    return table(["", "", "drafts", "acceptance length", "tokens a forward"], rows)


def lossless(report: Report) -> Lines:
    """Outputs with each head compared with the target alone."""
    rows: list[list[object]] = []
    for part, method in dict.fromkeys((row["part"], row["method"]) for row in report["rows"]):
        mine = [r for r in report["rows"] if (r["part"], r["method"]) == (part, method)]
        sizes = [f"{r['nodes']} nodes + lookup" if r["nodes"] else f"K = {r['k']}" for r in mine]
        drafts = "–" if method == "none" else ", ".join(dict.fromkeys(sizes))
        together = ", ".join(map(str, dict.fromkeys(row["batch"] for row in mine)))
        equal, whole, ties = (
            sum(row[name] for row in mine) for name in ("identical", "prompts", "ties")
        )
        same = f"{equal} of {whole}"
        rows.append([PARTS[part], NAMES[method], drafts, together, same, ties])
    settings = report["settings"]
    about = (
        f"Outputs that equal the target's own, decoded alone, on {settings['prompts']} HumanEval "
        f"prompts × at most {settings['max_tokens']} tokens ({report['device']}):"
    )
    head = ["", "head", "drafts", "prompts at a time", "identical", "ties"]
    return [about, "", *table(head, rows)]


def heads() -> Lines:
    """Heads of the catalog, with the acceptance lengths that are recorded for them."""
    rows: list[list[object]] = []
    for name, entry in load_catalog().items():
        for method, head in entry.heads.items():
            page = f"[{head.hub}](https://huggingface.co/{head.hub})"
            place = page if head.hub else "in this repository"
            shown = [each for each in head.acceptance if each.dataset in ("HumanEval", "MT-Bench")]
            lengths = [f"{each.dataset} {each.length:.2f} (K = {each.k})" for each in shown]
            sources = sorted({each.source for each in shown}) or ["the head's page"]
            title = f"{NAMES[method]}, {place}"
            rows.append([f"`{name}`", title, ", ".join(lengths) or "–", "; ".join(sources)])
    return table(["target", "head", "acceptance length", "source"], rows)


def grid(report: Report) -> Lines:
    """Speed-ups over the target alone by load, and the best K of each method."""
    rows = report["rows"]
    loads = sorted({row["concurrency"] for row in rows})
    base = {row["concurrency"]: row["output_tps"] for row in rows if row["method"] == "none"}
    lines: list[list[object]] = [["none", "–", "–", *(f"{base[load]:.1f} tok/s" for load in loads)]]
    for method, k in dict.fromkeys((r["method"], r["k"]) for r in rows if r["method"] != "none"):
        mine = {r["concurrency"]: r for r in rows if (r["method"], r["k"]) == (method, k)}
        lengths = [r["acceptance_length"] for r in mine.values() if r["acceptance_length"]]
        mean = f"{sum(lengths) / len(lengths):.2f}" if lengths else "–"
        cells = [times(mine[load]["speed_up"], mine[load]["speed_up_95"]) for load in loads]
        lines.append([NAMES[method], k, mean, *cells])
    settings = where(report, "conversations", "max_tokens", "dtype", "repeats")
    head = ["method", "K", "AL", *(f"c = {load}" for load in loads)]
    return [settings, "", *table(head, lines), *_best(rows, loads), ""]


def _best(rows: list[Report], loads: list[int]) -> Lines:
    """P-EAGLE compared with EAGLE-3, each at its best K."""
    best = dict[tuple[str, int], Report]()
    for row in sorted(rows, key=lambda row: row["output_tps"]):
        best[row["method"], row["concurrency"]] = row
    ratios, crossed = list[str](), list[str]()
    for c in loads:
        pair = [best.get((method, c)) for method in ("eagle3", "p-eagle")]
        crossed += [f"{NAMES[r['method']]} at c = {c}" for r in pair if r and r["speed_up"] < 1]
        if all(pair):
            ratios.append(f"{pair[1]['output_tps'] / pair[0]['output_tps']:.2f} (c = {c})")
    slower = f"Slower than the target alone, even at the best K: {', '.join(crossed)}."
    faster = "At no load is the best K of either slower than the target alone."
    ends = slower if crossed else faster
    against = f"P-EAGLE ÷ EAGLE-3, each at its best K: {', '.join(ratios)}."
    return [against, "", ends] if ratios else [ends]


def trees(report: Report) -> Lines:
    """Trees, lookup and chains: a data set at a time, then all loads."""
    lines = [where(report, "dtype", "max_tokens"), ""]
    loads: dict[int, list[Report]] = {}
    for part, rows in report["parts"].items():
        if part.startswith("load "):
            loads[int(part.removeprefix("load "))] = rows
        else:
            lines += _compared(part, rows)
    if loads:
        lines += _under_load(dict(sorted(loads.items())))
    return lines


def _compared(part: str, rows: list[Report]) -> Lines:
    """The table of one data set."""
    bases = sorted({base for row in rows for base in row["over"]})
    bases.sort(key=lambda base: base != "alone")
    lines: list[list[object]] = []
    for row in rows:
        cells = [row["way"], f"{row['output_tps']:.1f}", length(row), row["nodes"] or "–"]
        cells += [row["rows_per_round"], f"{row['tokens_per_forward']:.2f}"]
        same = f"{row['same']} of {row['compared']}" if "same" in row else "–"
        lines.append([*cells, *(_over(row, base) for base in bases), same])
    divided = [f"÷ {base}" for base in bases]
    head = ["", "tok/s", "AL", "nodes", "rows", "tokens a forward", *divided, "same answers"]
    title = f"**{TITLES[part]}**, {rows[0]['requests']} answers, one request at a time:"
    return [title, "", *table(head, lines)]


def _under_load(loads: dict[int, list[Report]]) -> Lines:
    """Speed-ups over the target alone, by load."""
    found = {(c, row["way"]): row for c, rows in loads.items() for row in rows}
    ways = [row["way"] for row in next(iter(loads.values()))]
    lines: list[list[object]] = []
    for way in ways:
        cells = [_over(found[c, way], "alone") for c in loads]
        speeds = [f"{found[c, way]['output_tps']:.1f} tok/s" for c in loads]
        lines.append([way, *(speeds if way == "alone" else cells)])
    best = list[str]()
    for c in loads:
        row = found[c, "P-EAGLE"]
        pinned = next(base for base in row["over"] if base != "alone")
        best.append(f"{_over(row, pinned)} {pinned} (c = {c})")
    first = found[next(iter(loads)), ways[0]]
    title = f"**Loads**, {first['repeats']} repeats, {first['requests']} answers each:"
    against = f"P-EAGLE ÷ the best pinned setting: {', '.join(best)}."
    return [title, "", *table(["", *(f"c = {c}" for c in loads)], lines), against, ""]


def _over(row: Report, base: str) -> str:
    """The speed-up over another way."""
    return times(*row["over"][base]) if base in row["over"] else "–"


def engines(report: Report) -> Lines:
    """Engines side by side."""
    target = report["settings"]["target"]
    lines: list[list[object]] = []
    for row in report["rows"]:
        cells = [row["concurrency"], row["engine"], row["weights"], row["method"], row["k"] or "–"]
        speed = f"{row['tokens_per_second']:.1f} ({row['least']:.1f}–{row['most']:.1f})"
        lines.append([*cells, times(row["ratio"], None), speed, length(row), row["same"]])
    head = ["c", "engine", "weights", "method", "K", "× ours alone", "tok/s", "AL", "same ids"]
    left = [f"Left out: {name}: {why}." for name, why in report["left_out"].items()]
    settings = where(report, "prompts", "max_tokens", "repeats", "threads")
    return [f"{target}, {settings}", "", *table(head, lines), *left, ""]


def families(report: Report) -> Lines:
    """Tiny random models of every family."""
    lines: list[list[object]] = []
    for row in report["rows"]:
        made, out, ours = row["train"], row["export"], row["generate"]
        lines.append([
            f"{row['family']} (`{row['architecture']}`)",
            f"{made['steps']} steps, loss {made['loss_first']:.2f} → {made['loss_last']:.2f}",
            f"{ours['same']} of {ours['prompts']}, AL {ours['acceptance_length']:.2f}",
            f"`{out['architecture']}`, same weights: {'yes' if out['same_weights'] else 'NO'}",
            _in_vllm(row.get("vllm"), ours["prompts"]),
        ])  # fmt: skip
    head = ["target", "train", "generate = none", "export", "vLLM"]
    return [where(report, *report["settings"]), "", *table(head, lines)]


def _in_vllm(found: Report | None, prompts: int) -> str:
    if found is None:
        return "not run"
    parts = [
        f"{NAMES[method]}: {found[method]['same']} of {prompts} as ours"
        + (f", AL {found[method]['acceptance_length']:.2f}" if method == "p-eagle" else "")
        for method in ("none", "p-eagle")
        if method in found
    ]
    if refused := found.get("refused"):
        message = refused["message"].replace("|", "\\|")
        parts.append(f"{NAMES[refused['method']]} refused: `{message}`")
    return "; ".join(parts)


def training_speed(report: Report) -> Lines:
    """Training speed of a head."""
    lines: list[list[object]] = [
        [row["row"], row["answer_tokens_per_second"], row["megaflops_a_token"],
         f"{100 * row['share_of_peak']:.0f} %"]
        for row in report["rows"]
    ]  # fmt: skip
    head = ["way", "answer tokens a second", "MFLOP a token", "of the device's peak"]
    kind = report.get("peak_dtype", "bf16")
    about = f"Peak {report['peak_flops'] / 1e9:.0f} GFLOP/s ({kind} product of 4,096 × 4,096)."
    return [where(report, "threads", "pack"), about, "", *table(head, lines)]


Sections = dict[str, tuple[str | None, Callable[[Report], Lines]]]  # by result: title, lines
SHIPPED: Sections = {
    "acceptance": (None, acceptance),
    "acceptance_trees": ("Acceptance with trees and lookup", by_drafts),
    "acceptance_kinds": ("Acceptance by kind of text", by_drafts),
    "acceptance_context": ("Acceptance after long contexts", by_drafts),
    "lossless": (None, lossless),
}
BENCHMARKS: Sections = {
    "bench": ("HumanEval prompts at several loads, this engine", grid),
    "trees": ("Trees, lookup and chains on whole data sets and under load", trees),
    "bench-gpt-oss-20b": ("GPT-OSS-20B's shape, random weights, given acceptance", grid),
    "engines": ("Engines side by side", engines),
    "engines_qwen": ("Engines side by side, Qwen2.5-Coder-0.5B", engines),
    "engines_gemma": ("Engines side by side, Gemma 3 270M", engines),
    "families": ("Every family of targets", families),
}
CPUS = {"": "", "_avx2": ", on a CPU without AVX-512", "_amx": ", on a CPU with AMX"}
TRAINING: Sections = {"training_speed": ("How fast a head trains", training_speed)}


def lines_of(sections: Sections) -> Lines:
    """The tables of the results that exist and are complete."""
    lines = Lines()
    for result, (title, section) in sections.items():
        for end, cpu in CPUS.items():
            name = f"{result}{end}"
            file = RESULTS / f"{name}.json"
            report = json.loads(file.read_text()) if file.is_file() else {"complete": False}
            if not report.get("complete", True):
                continue
            lines += [f"### {title}{cpu}", ""] if title else []
            lines += section(report)
            lines += [f"From `benchmarks/results/{name}.json`.", ""]
    return lines


def replace(page: str, name: str, lines: Lines) -> None:
    """Write lines between the page's markers."""
    file, begin = ROOT / page, f"<!-- tables: {name} -->"
    before, rest = file.read_text().split(begin)
    _, after = rest.split(END, 1)
    file.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n{END}{after}")


def main() -> None:
    replace("README.md", "heads", heads())
    replace("docs/benchmarks.md", "shipped heads", lines_of(SHIPPED))
    replace("docs/benchmarks.md", "benchmarks", lines_of(BENCHMARKS))
    replace("docs/training.md", "training", lines_of(TRAINING))


if __name__ == "__main__":
    main()

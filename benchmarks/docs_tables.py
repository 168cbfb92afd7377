"""Write the tables of the docs from benchmarks/results/: of the results that exist.

python benchmarks/docs_tables.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = RESULTS.parents[1] / "docs"
END = "<!-- end of tables -->"
TITLES = {
    "humaneval": "HumanEval",
    "mt-bench": "MT-Bench, both turns",
    "edits": "Edits: a file of 60 lines with one variable renamed",
}
NAMES = {"none": "the target alone", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}

Lines = list[str]
Report = dict[str, Any]


def table(head: list[str], rows: list[list[object]]) -> Lines:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def where(report: Report, *settings: str) -> str:
    """Device and settings, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    given = "; ".join(f"{name.replace('_', ' ')} {report['settings'][name]}" for name in settings)
    return f"{report['device']}; {versions}{'; ' + given if given else ''}."


def grid(report: Report) -> Lines:
    """Times the target alone at each load, the best K of each method, and where they cross."""
    rows, base = report["rows"], {}
    loads = sorted({row["concurrency"] for row in rows})
    for row in rows:
        if row["method"] == "none":
            base[row["concurrency"]] = row
    head = ["method", "K", "AL", *(f"c = {load}" for load in loads)]
    lines: list[list[object]] = [
        ["none", "–", "–", *(f"{base[load]['output_tps']:.1f} tok/s" for load in loads)]
    ]
    kinds = dict.fromkeys((row["method"], row["k"]) for row in rows if row["method"] != "none")
    for method, k in kinds:
        mine = {r["concurrency"]: r for r in rows if (r["method"], r["k"]) == (method, k)}
        lengths = [r["acceptance_length"] for r in mine.values() if r["acceptance_length"]]
        mean = f"{sum(lengths) / len(lengths):.2f}" if lengths else "–"
        lines.append([NAMES[method], k, mean, *(_times(mine[load]) for load in loads)])
    settings = ("conversations", "max_tokens", "dtype", "repeats")
    return [where(report, *settings), "", *table(head, lines), *_best(rows, loads), ""]


def _times(row: Report) -> str:
    low, high = row["speed_up_95"] or (None, None)
    edges = f" ({low:.2f}–{high:.2f})" if low else ""
    return f"{row['speed_up']:.2f} ×{edges}"


def _best(rows: list[Report], loads: list[int]) -> Lines:
    """P-EAGLE and EAGLE-3 at their best K, one against the other."""
    ratios, crossed = list[str](), list[str]()
    for load in loads:
        fastest = {
            method: max((r for r in rows if (r["method"], r["concurrency"]) == (method, load)),
                        key=lambda r: r["output_tps"], default=None)
            for method in NAMES
        }  # fmt: skip
        mine, theirs = fastest["p-eagle"], fastest["eagle3"]
        if mine and theirs:
            ratios.append(f"{mine['output_tps'] / theirs['output_tps']:.2f} (c = {load})")
        for method in ("eagle3", "p-eagle"):
            row = fastest[method]
            if row and row["speed_up"] < 1:
                crossed.append(f"{NAMES[method]} at c = {load}")
    lines = [f"P-EAGLE ÷ EAGLE-3, each at its best K: {', '.join(ratios)}."] if ratios else []
    slower = f"slower than the target alone, even at the best K: {', '.join(crossed)}"
    return [*lines, "", f"{slower[0].upper()}{slower[1:]}." if crossed else
            "At no load is the best K of either slower than the target alone."]  # fmt: skip


def trees(report: Report) -> Lines:
    """Trees, lookup and chains: a data set at a time, then all loads."""
    lines = [where(report, "dtype", "max_tokens"), ""]
    loads: dict[str, list[Report]] = {}
    for part, rows in report["parts"].items():
        if part.startswith("load "):
            loads[part.removeprefix("load ")] = rows
        else:
            lines += _compared(part, rows)
    aims: list[list[object]] = [
        [aim["aim"], aim["wanted"], aim["found"], "met" if aim["met"] else "not met"]
        for aim in report["aims"]
    ]
    more = _under_load(loads) if loads else []
    return [*lines, *more, *table(["aim", "wanted", "found", ""], aims)]


def _compared(part: str, rows: list[Report]) -> Lines:
    """A data set."""
    bases = sorted({base for row in rows for base in row["over"]})
    bases.sort(key=lambda base: base != "alone")
    lines: list[list[object]] = []
    for row in rows:
        length = f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "–"
        lines.append([row["way"], f"{row['output_tps']:.1f}", length, row["nodes"] or "–",
                      row["rows_per_round"], f"{row['tokens_per_forward']:.2f}",
                      *(_over(row, base) for base in bases),
                      f"{row['same']} of {row['compared']}" if "same" in row else "–"])  # fmt: skip
    divided = [f"÷ {base}" for base in bases]
    head = ["", "tok/s", "AL", "nodes", "rows", "tokens a forward", *divided, "same answers"]
    title = f"**{TITLES[part]}**, {rows[0]['requests']} answers, one request at a time:"
    return [title, "", *table(head, lines)]


def _under_load(loads: dict[str, list[Report]]) -> Lines:
    """Times the target alone, by load."""
    lines: list[list[object]] = []
    loads = dict(sorted(loads.items(), key=lambda load: int(load[0])))
    ways = [row["way"] for row in next(iter(loads.values()))]
    found = {(c, row["way"]): row for c, rows in loads.items() for row in rows}
    for way in ways:
        cells = (_over(found[c, way], "alone") for c in loads)
        speeds = (f"{found[c, way]['output_tps']:.1f} tok/s" for c in loads)
        lines.append([way, *(speeds if way == "alone" else cells)])
    best = list[str]()
    for c in loads:
        beside = [base for base in found[c, "P-EAGLE"]["over"] if base != "alone"]
        best.append(f"{_over(found[c, 'P-EAGLE'], beside[0])} {beside[0]} (c = {c})")
    first = found[next(iter(loads)), ways[0]]
    title = f"**Loads**, {first['repeats']} repeats, {first['requests']} answers each:"
    said = f"P-EAGLE ÷ the best pinned setting: {', '.join(best)}."
    return [title, "", *table(["", *(f"c = {c}" for c in loads)], lines), said, ""]


def _over(row: Report, base: str) -> str:
    """Times another way's speed."""
    if base not in row["over"]:
        return "–"
    ratio, edges = row["over"][base]
    return f"{ratio:.2f} ×" + (f" ({edges[0]:.2f}–{edges[1]:.2f})" if edges else "")


def engines(report: Report) -> Lines:
    """Engines side by side."""
    lines: list[list[object]] = []
    for row in report["rows"]:
        speed = f"{row['tokens_per_second']:.1f} ({row['least']:.1f}–{row['most']:.1f})"
        lines.append([row["concurrency"], row["engine"], row["weights"], row["method"],
                      row["k"] or "–", f"{row['ratio']:.2f} ×", speed,
                      f"{row['acceptance_length']:.2f}", row["same"]])  # fmt: skip
    head = ["c", "engine", "weights", "method", "K", "× ours alone", "tok/s", "AL", "same ids"]
    goals: list[list[object]] = [
        [g["goal"], g["wanted"], g["ratio"] or "–",
         {True: "met", False: "not met", None: "not measured"}[g["met"]]]
        for g in report["goals"]
    ]  # fmt: skip
    left = [f"Left out: {name}: {why}." for name, why in report["left_out"].items()]
    settings = where(report, "prompts", "max_tokens", "repeats", "threads")
    return [settings, "", *table(head, lines), *left, "",
            *table(["aim", "wanted", "found", ""], goals)]  # fmt: skip


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
        said = refused["message"].replace("|", "\\|")
        parts.append(f"{NAMES[refused['method']]} refused: `{said}`")
    return "; ".join(parts)


def training_speed(report: Report) -> Lines:
    """How fast a head trains."""
    lines: list[list[object]] = [
        [row["row"], row["answer_tokens_per_second"], row["megaflops_a_token"],
         f"{100 * row['share_of_peak']:.0f} %"]
        for row in report["rows"]
    ]  # fmt: skip
    head = ["way", "answer tokens a second", "MFLOP a token", "of the device's peak"]
    about = f"Peak {report['peak_flops'] / 1e9:.0f} GFLOP/s (bf16 product of 4,096 × 4,096)."
    return [where(report, "threads", "pack"), about, "", *table(head, lines)]


BENCHMARKS: dict[str, tuple[str, Callable[[Report], Lines]]] = {
    "bench": ("HumanEval prompts at several loads, this engine", grid),
    "bench-vllm": ("The same, vLLM's servers with the same heads", grid),
    "trees": ("Trees, lookup and chains on whole data sets and under load", trees),
    "bench-gpt-oss-20b": ("GPT-OSS-20B's shape, random weights, given acceptance", grid),
    "engines": ("Engines side by side", engines),
    "families": ("Every family of targets", families),
}
TRAINING: dict[str, tuple[str, Callable[[Report], Lines]]] = {
    "training_speed": ("How fast a head trains", training_speed),
}
PAGES = (
    ("benchmarks.md", "<!-- tables: make bench -->", BENCHMARKS),
    ("training.md", "<!-- tables: training -->", TRAINING),
)


def main() -> None:
    for name, begin, sections in PAGES:
        lines = Lines()
        for result, (title, section) in sections.items():
            file = RESULTS / f"{result}.json"
            if file.is_file():
                lines += [f"### {title}", "", *section(json.loads(file.read_text()))]
                lines += [f"From `benchmarks/results/{result}.json`.", ""]
        page = DOCS / name
        before, rest = page.read_text().split(begin)
        _, after = rest.split(END)
        page.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    main()

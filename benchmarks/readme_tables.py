"""Write the table of heads in README.md, and the tables of the shipped heads in docs/benchmarks.md.

    python benchmarks/readme_tables.py

From peagle/catalog.yaml and benchmarks/results/.
"""

import json
from pathlib import Path
from typing import Any

from peagle.catalog import load_catalog

RESULTS = Path(__file__).resolve().parent / "results"
README = RESULTS.parents[1] / "README.md"
PAGE = README.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: benchmarks/readme_tables.py -->", "<!-- end of tables -->"
TITLES = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}
PARTS = {
    "float32": "float32, greedy",
    "float32-sampled": "float32, sampled",
    "exact": "bf16, batch-invariant, greedy",
    "exact-sampled": "bf16, batch-invariant, sampled",
}
NAMES = {"none": "the target alone", "eagle3": "EAGLE-3, 1 layer", "p-eagle": "P-EAGLE, 4 layers"}


def read(name: str) -> dict[str, Any]:
    """One result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def speed() -> list[str]:
    """The demo's table."""
    demo = read("demo-8-prompts")
    base = demo["rows"][0]["tokens_per_second"]
    lines = [
        f"`peagle demo`: {demo['prompts']} HumanEval prompts, at most {demo['max_tokens']} tokens "
        f"each, greedy, {demo['dtype']}, one request at a time, on {demo['device']}; token ids "
        f"{'identical' if demo['identical'] else 'NOT identical'} in all rows.",
        "",
        "| | K | tok/s | | acceptance length |",
        "|---|---|---|---|---|",
    ]
    for row in demo["rows"]:
        ratio = f"{row['tokens_per_second'] / base:.2f} ×"
        length = f"{row['acceptance_length']:.2f}"
        k = row["k"] or "–"
        speed = f"{row['tokens_per_second']:.1f}"
        lines.append(f"| {NAMES[row['method']]} | {k} | {speed} | {ratio} | {length} |")
    return lines


def acceptance() -> list[str]:
    """Acceptance length by data set, K and head."""
    rows = read("acceptance")["rows"]
    depths = sorted({row["k"] for row in rows})
    heads = " | ".join(f"K = {k}" for k in depths)
    lines = [
        "Acceptance length (1 + accepted draft tokens a round), chat template, greedy, bf16:",
        "",
        f"| | | {heads} |",
        "|---|---|" + "---|" * len(depths),
    ]
    for dataset in ("HumanEval", "MT-Bench"):
        for method in ("eagle3", "p-eagle"):
            found = {r["k"]: r for r in rows if (r["dataset"], r["method"]) == (dataset, method)}
            lengths = " | ".join(f"{found[k]['acceptance_length']:.2f}" for k in depths)
            most = next(iter(found.values()))["settings"]["max_tokens"]
            lines.append(f"| {dataset}, at most {most} tokens | {NAMES[method]} | {lengths} |")
    return lines


def same() -> list[str]:
    """Losslessness."""
    report = read("lossless")
    settings = report["settings"]
    lines = [
        f"Outputs that equal the target's own, decoded alone, on {settings['prompts']} HumanEval "
        f"prompts × at most {settings['max_tokens']} tokens ({report['device']}):",
        "",
        "| | head | drafts | prompts at a time | identical | ties |",
        "|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((row["part"], row["method"]) for row in report["rows"])
    for part, method in kinds:
        rows = [r for r in report["rows"] if (r["part"], r["method"]) == (part, method)]
        sizes = dict.fromkeys(
            f"{row['nodes']} nodes + lookup" if row["nodes"] else f"K = {row['k']}" for row in rows
        )
        drafts = "–" if method == "none" else ", ".join(sizes)
        together = ", ".join(map(str, dict.fromkeys(row["batch"] for row in rows)))
        equal, whole, ties = (
            sum(row[name] for row in rows) for name in ("identical", "prompts", "ties")
        )
        cells = [PARTS[part], NAMES[method], drafts, together, f"{equal} of {whole}", str(ties)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def heads() -> list[str]:
    """Heads of the catalog, with the acceptance lengths that are recorded for them."""
    lines = ["| target | head | acceptance length | source |", "|---|---|---|---|"]
    for name, entry in load_catalog().items():
        for method, head in entry.heads.items():
            place = (
                f"[{head.hub}](https://huggingface.co/{head.hub})"
                if head.hub
                else "in this repository"
            )
            shown = [each for each in head.acceptance if each.dataset in ("HumanEval", "MT-Bench")]
            lengths = [f"{each.dataset} {each.length:.2f} (K = {each.k})" for each in shown]
            sources = sorted({each.source for each in shown}) or ["the head's page"]
            cells = [f"`{name}`", f"{TITLES[method]}, {place}", ", ".join(lengths) or "–"]
            lines.append(f"| {' | '.join([*cells, '; '.join(sources)])} |")
    return lines


def replace(file: Path, lines: list[str]) -> None:
    """Write lines between a file's markers."""
    before, rest = file.read_text().split(BEGIN)
    after = rest.split(END, 1)[1]
    tables = "\n".join(lines)
    file.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")


def main() -> None:
    replace(README, heads())
    replace(PAGE, [*speed(), "", *acceptance(), "", *same()])


if __name__ == "__main__":
    main()

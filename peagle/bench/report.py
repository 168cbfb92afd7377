"""A page for a measurement, which needs no network, and its figures as PNG."""

import io
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader

from peagle.engine.drafting import Drafting
from peagle.errors import InputError
from peagle.files import replace_file
from peagle.methods.registry import METHODS

HERE = Path(__file__).parent

Row = dict[str, Any]
Points = tuple[list[float], list[float]]  # x and y


def check() -> None:
    """Raises InputError when matplotlib is missing, before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed", fix="pip install 'peagle[bench]'")


def write(report: dict[str, Any], output: Path) -> list[Path]:
    """Write OUTPUT.html and OUTPUT-NAME.png next to the JSON file `output`; returns their paths."""
    figures = draw(report["rows"])
    written = [output.with_suffix(".html")]
    for name, figure in figures.items():
        written.append(output.with_name(f"{output.stem}-{name}.png"))
        figure.savefig(written[-1], dpi=150)
    pages = Environment(loader=FileSystemLoader(HERE), autoescape=True)
    page = pages.get_template("report.html.j2").render(
        report=report,
        methods=read_methods(),
        drafts=lambda row: str(Drafting.from_row(row)),
        pictures={name: _svg(figure) for name, figure in figures.items()},
        published=published(report),
    )
    replace_file(written[0], page)
    return written


def published(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Published ratios for the report's data set, each with the ratio measured here under the same
    number of conversations; None where it was not measured."""
    greedy = [row for row in fastest(report["rows"]) if not row["temperature"]]
    speeds = {(row["method"], row["concurrency"]): row["output_tps"] for row in greedy}
    found = []
    for figure in yaml.safe_load((HERE / "published.yaml").read_text()):
        if figure["dataset"] != report["settings"]["dataset"]:
            continue
        for concurrency, ratio in figure["by_concurrency"].items():
            speed = speeds.get((figure["method"], concurrency))
            base = speeds.get((figure["over"], concurrency))
            here = round(speed / base, 2) if speed and base else None
            found.append({**figure, "concurrency": concurrency, "ratio": ratio, "here": here})
    return found


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg")
    text = file.getvalue()
    return text[text.index("<svg") :]


class MethodFacts(NamedTuple):
    """Title and colour of a method in a report."""

    title: str
    colour: str


@cache
def read_methods() -> dict[str, MethodFacts]:
    """Every drafting method by name, in the order of a report, "none" among them."""
    colours = yaml.safe_load((HERE / "methods.yaml").read_text())
    titles = {name: method.title for name, method in METHODS.items()}
    return {name: MethodFacts(titles.get(name, name), colours[name]) for name in colours}


def draw(rows: list[Row]) -> dict[str, Any]:
    """Figures by name, without those that have nothing to show."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra; no global state)

    figures = {}
    for picture in (throughput, acceptance, positions, latency, pareto):
        figure = Figure(figsize=(7, 4), layout="constrained")
        if picture(figure.subplots(), rows):
            figures[picture.__name__] = figure
    return figures


def fastest(rows: list[Row]) -> list[Row]:
    """The row of the fastest setting, for each method and load."""
    found = dict[tuple[str, int, float], Row]()
    for row in rows:
        key = row["method"], row["concurrency"], row["temperature"]
        found[key] = max(found.get(key, row), row, key=itemgetter("output_tps"))
    return list(found.values())


def throughput(axes: Any, rows: list[Row]) -> bool:
    """Bars of tokens per second at each load; above them, times the target alone."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    rows = [row for row in fastest(rows) if not row["temperature"]]
    loads = sorted({row["concurrency"] for row in rows})
    shown = {name: facts for name, facts in read_methods().items() if _of(name, rows)}
    width = 0.8 / max(1, len(shown))
    for number, (method, facts) in enumerate(shown.items()):
        for row in _of(method, rows):
            x = loads.index(row["concurrency"]) + (number + 0.5) * width - 0.4
            height = row["output_tps"]
            low, high = row["output_tps_95"] or (height, height)
            spread = [[max(0.0, height - low)], [max(0.0, high - height)]]
            axes.bar(x, height, width, color=facts.colour, yerr=spread, ecolor="#444444")
            if row["k"] != 0 and row.get("speed_up"):
                setting = str(Drafting.from_row(row)).replace(" + ", "\n+ ")
                label = f"{row['speed_up']:.2f}×\n{setting}"
                axes.annotate(label, (x, high), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(loads)), [f"c = {load}" if load else "random" for load in loads])
    axes.set_ylabel("output tokens a second")
    axes.set_title("Throughput, fastest setting; × the target alone")
    axes.margins(y=0.15)
    patches = [Patch(color=facts.colour, label=facts.title) for facts in shown.values()]
    axes.legend(handles=patches, loc="best")
    return bool(rows)


def acceptance(axes: Any, rows: list[Row]) -> bool:
    """Acceptance length against K, where K was pinned to several."""
    rows = [row for row in rows if row["acceptance_length"] and isinstance(row["k"], int)]
    _plot_lines(axes, rows, _mean_lengths)
    axes.set(xlabel="K", ylabel="acceptance length", title="Acceptance length")
    return len({row["k"] for row in rows}) > 1


def positions(axes: Any, rows: list[Row]) -> bool:
    """Share of rounds whose i-th draft token was accepted, at the largest K of each method."""
    rows = [row for row in rows if row["accepted_per_position"]]
    _plot_lines(axes, rows, _most_shares)
    axes.set(xlabel="draft token", ylabel="share of rounds", ylim=(0, 1))
    axes.set_title("Accepted, by position")
    return bool(rows)


def latency(axes: Any, rows: list[Row]) -> bool:
    """Milliseconds to the first token and per token: median, and a line to the 99th percentile."""
    rows = [row for row in fastest(rows) if row["tpot_ms_p50"]]
    methods = read_methods()
    for x, row in enumerate(rows):
        colour = methods[row["method"]].colour
        for shift, name, hatch in ((-0.2, "ttft", "//"), (0.2, "tpot", "")):
            half = row[f"{name}_ms_p50"]
            spread = [[0], [max(0, row[f"{name}_ms_p99"] - half)]]
            look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
            axes.bar(x + shift, half, 0.38, yerr=spread, **look)
    names = [f"{methods[row['method']].title}\nc = {row['concurrency']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    axes.set(yscale="log", ylabel="ms", title="TTFT (hatched) and TPOT: median, to p99")
    return bool(rows)


def pareto(axes: Any, rows: list[Row]) -> bool:
    """Speed of one user against that of the machine, where there are several loads."""
    rows = [row for row in fastest(rows) if row["tpot_ms_p50"]]
    _plot_lines(axes, rows, _speeds)
    axes.set(xlabel="tokens a second for one user", ylabel="tokens a second for all")
    axes.set_title("Pareto")
    return len({row["concurrency"] for row in rows}) > 1


def _plot_lines(axes: Any, rows: list[Row], points: Callable[[list[Row]], Points]) -> None:
    """A line for each method, and a legend."""
    for method, facts in read_methods().items():
        if mine := _of(method, rows):
            axes.plot(*points(mine), "o-", color=facts.colour, label=facts.title)
    if rows:
        axes.legend()


def _of(method: str, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["method"] == method]


def _mean_lengths(rows: list[Row]) -> Points:
    by_k = defaultdict[int, list[float]](list)
    for row in rows:
        by_k[row["k"]].append(row["acceptance_length"])
    depths = sorted(by_k)
    return list(depths), [mean(by_k[k]) for k in depths]


def _most_shares(rows: list[Row]) -> Points:
    shares = max((row["accepted_per_position"] for row in rows), key=len)
    return list(range(1, len(shares) + 1)), shares


def _speeds(rows: list[Row]) -> Points:
    rows = sorted(rows, key=lambda row: row["concurrency"])
    return [1000 / row["tpot_ms_p50"] for row in rows], [row["output_tps"] for row in rows]

"""A page for a measurement, which needs no network."""

import io
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from peagle.bench.summary import doubt
from peagle.engine.drafting import Drafting
from peagle.errors import InputError
from peagle.files import replace_file
from peagle.methods.registry import METHODS

# Methods in the order of a report.
COLOURS = {"none": "#8c8c8c", "lookup": "#4f9a5f", "eagle3": "#d98324", "p-eagle": "#2f6fb0"}

Row = dict[str, Any]


def check(output: Path) -> None:
    """Raises InputError when matplotlib is missing, or the page would replace the JSON file
    `output`, before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed", fix="pip install 'peagle[bench]'")
    if output.suffix == ".html":
        raise InputError("is the page's name", field="output", value=output, fix="name a JSON file")


def write(report: dict[str, Any], output: Path) -> Path:
    """Write OUTPUT.html next to the JSON file `output`; returns its path."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = templates.get_template("report.html.j2").render(
        report=report,
        title=title,
        drafts=lambda row: str(Drafting.from_row(row)),
        doubt=doubt,
        pictures=draw(report["rows"]),
    )
    file = output.with_suffix(".html")
    replace_file(file, page)
    return file


def title(method: str) -> str:
    """The name of a method in a report."""
    return METHODS[method].title if method in METHODS else method


def draw(rows: list[Row]) -> list[str]:
    """Figures as SVG, without those that have nothing to show."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra; no global state)

    pictures = []
    for picture in (throughput, acceptance):
        figure = Figure(figsize=(7, 4), layout="constrained")
        if picture(figure.subplots(), rows):
            file = io.StringIO()
            figure.savefig(file, format="svg")
            pictures.append("<svg" + file.getvalue().partition("<svg")[2])
    return pictures


def fastest(rows: list[Row]) -> list[Row]:
    """The row of the fastest setting, for each method and load."""
    found = dict[tuple[str, int, float], Row]()
    for row in rows:
        key = row["method"], row["concurrency"], row["temperature"]
        found[key] = max(found.get(key, row), row, key=itemgetter("output_tps"))
    return list(found.values())


def throughput(axes: Any, rows: list[Row]) -> bool:
    """Bars of tokens per second at each load; above them, times the target alone."""
    rows = [row for row in fastest(rows) if not row["temperature"]]
    loads = sorted({row["concurrency"] for row in rows})
    measured = {row["method"] for row in rows}
    methods = [name for name in COLOURS if name in measured]
    width = 0.8 / max(1, len(methods))
    for number, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method]
        places = [loads.index(row["concurrency"]) + number * width for row in mine]
        heights = np.array([row["output_tps"] for row in mine])
        edges = np.array([row["output_tps_95"] or [row["output_tps"]] * 2 for row in mine])
        look = {"color": COLOURS[method], "label": title(method), "ecolor": "#444444"}
        bars = axes.bar(places, heights, width, yerr=abs(edges.T - heights), **look)
        axes.bar_label(bars, [_speed_up(row) for row in mine], fontsize=7)
    names = [f"c = {load}" for load in loads]
    axes.set_xticks(np.arange(len(loads)) + 0.4 - width / 2, names)
    axes.set(ylabel="output tokens a second", title="Fastest setting; × the target alone")
    axes.margins(y=0.15)
    if rows:
        axes.legend()
    return bool(rows)


def _speed_up(row: Row) -> str:
    """The label of a bar: speed-up over the target alone, and the setting."""
    if row["method"] == "none" or not row.get("speed_up") or doubt(row):
        return ""
    setting = str(Drafting.from_row(row)).replace(" + ", "\n+ ")
    return f"{row['speed_up']:.2f}×\n{setting}"


def acceptance(axes: Any, rows: list[Row]) -> bool:
    """Acceptance length against K, at the first load, where K was pinned to several."""
    rows = [row for row in rows if row["acceptance_length"] and isinstance(row["k"], int)]
    first = min([(row["concurrency"], row["temperature"]) for row in rows], default=None)
    rows = [row for row in rows if (row["concurrency"], row["temperature"]) == first]
    for method, colour in COLOURS.items():
        mine = {row["k"]: row["acceptance_length"] for row in rows if row["method"] == method}
        if mine:
            depths, lengths = zip(*sorted(mine.items()), strict=True)
            axes.plot(depths, lengths, "o-", color=colour, label=title(method))
    axes.set(xlabel="K", ylabel="acceptance length")
    if rows:
        axes.legend()
    return len({row["k"] for row in rows}) > 1

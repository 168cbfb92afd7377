"""One page for a measurement, which needs no network, and its pictures as PNG."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from peagle.bench.plots import NAMES, best, draw
from peagle.errors import InputError

HERE = Path(__file__).parent
PAIRS = {"P-EAGLE ÷ none": ("p-eagle", "none"), "P-EAGLE ÷ EAGLE-3": ("p-eagle", "eagle3")}


def check() -> None:
    """Raises InputError when nothing can draw, before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise InputError("matplotlib is not installed: pip install 'peagle[bench]'")


def write(report: dict[str, Any], output: Path) -> list[Path]:
    """OUTPUT.html and OUTPUT-NAME.png, beside the JSON file `output`; returns what was written."""
    figures = draw(report["rows"])
    written = list[Path]()
    for name, figure in figures.items():
        picture = output.with_name(f"{output.stem}-{name}.png")
        figure.savefig(picture, dpi=150)
        written.append(picture)
    page = output.with_suffix(".html")
    pages = Environment(loader=FileSystemLoader(HERE), autoescape=True)
    text = pages.get_template("report.html.j2").render(
        report=report,
        names=NAMES,
        pictures={name: _svg(figure) for name, figure in figures.items()},
        published=published(report),
    )
    page.write_text(text)
    return [page, *written]


def published(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Published ratios beside those measured here under the same number of conversations; None
    where this was not measured."""
    speeds = {(r["method"], r["concurrency"]): r["output_tps"]
              for r in best(report["rows"]) if not r["temperature"]}  # fmt: skip
    found = []
    for figure in yaml.safe_load((HERE / "published.yaml").read_text()):
        if figure["dataset"] != report["settings"]["dataset"]:
            continue
        mine, theirs = PAIRS[figure["what"]]
        for concurrency, ratio in figure["by_concurrency"].items():
            pair = speeds.get((mine, concurrency)), speeds.get((theirs, concurrency))
            here = round(pair[0] / pair[1], 2) if pair[0] and pair[1] else None
            found.append({**figure, "concurrency": concurrency, "ratio": ratio, "here": here})
    return found


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]

"""A page for a measurement, which needs no network, and its figures as PNG."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from peagle.bench.plots import draw, fastest, read_methods
from peagle.engine.drafting import Drafting
from peagle.errors import InputError
from peagle.files import replace_file

HERE = Path(__file__).parent


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
    methods = read_methods()
    greedy = [row for row in fastest(report["rows"]) if not row["temperature"]]
    speeds = {(row["method"], row["concurrency"]): row["output_tps"] for row in greedy}
    found = []
    for figure in yaml.safe_load((HERE / "published.yaml").read_text()):
        if figure["dataset"] != report["settings"]["dataset"]:
            continue
        what = f"{methods[figure['method']].title} ÷ {methods[figure['over']].title}"
        for concurrency, ratio in figure["by_concurrency"].items():
            speed = speeds.get((figure["method"], concurrency))
            base = speeds.get((figure["over"], concurrency))
            here = round(speed / base, 2) if speed and base else None
            row = {"what": what, "concurrency": concurrency, "ratio": ratio, "here": here}
            found.append({**figure, **row})
    return found


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg")
    text = file.getvalue()
    return text[text.index("<svg") :]

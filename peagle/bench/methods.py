"""How reports show drafting methods; the colours are in methods.yaml."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from peagle.methods.registry import METHODS


class MethodFacts(NamedTuple):
    """What a report shows of a method."""

    title: str
    colour: str


@cache
def read_methods() -> dict[str, MethodFacts]:
    """Every drafting method by name, in the order of a report, "none" among them."""
    colours = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    titles = {name: method.title for name, method in METHODS.items()}
    return {name: MethodFacts(titles.get(name, name), colours[name]) for name in colours}

"""How reports show drafting methods; the facts are in methods.yaml."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml


class MethodFacts(NamedTuple):
    """What a report, and a head with random weights, need to know of a method."""

    title: str
    colour: str
    layers: int = 0  # of the published heads


@cache
def read_methods() -> dict[str, MethodFacts]:
    """Every drafting method by name, in the order of a report."""
    methods = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: MethodFacts(**facts) for name, facts in methods.items()}

"""Templates of what a deployment sends, in `templates/`."""

import math
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Fill a template of `templates/`. Its filter `to_yaml` quotes a value, or writes a list or a
    mapping in lines, which `indent` moves to their place."""
    environment = Environment(
        loader=PackageLoader("peagle.deploy"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["to_yaml"] = _to_yaml
    return environment.get_template(template).render(values)


def _to_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").removesuffix("\n")

"""Data files of deployments: facts of others (GPUs, instance types, images, versions) in
facts.yaml, and templates of what is sent in `templates/`."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from peagle.catalog_fields import read_record


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU."""

    memory: int  # GiB
    capability: str
    instances: Mapping[str, int]  # SageMaker's types and their numbers of GPUs


@dataclass(frozen=True, slots=True)
class Cuda:
    """Needs of a major version of CUDA: a driver, and SageMaker's AMI that has it."""

    driver: int
    ami: str


@dataclass(frozen=True, slots=True)
class Image:
    """A container image; None: not known."""

    place: str
    name: str
    vllm: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of facts.yaml."""

    gpus: Mapping[str, Gpu]
    default_gpu: Mapping[str, str]  # by place
    cpu_instance: str
    images: tuple[Image, ...]
    cuda: Mapping[str, Cuda]  # by major version, the newest last
    registries: Mapping[str, str]  # account of AWS's images by region
    p_eagle_tried: str  # the newest vLLM that was tried with a P-EAGLE head
    oldest_vllm: str  # that a deployment's flags fit


@cache
def facts() -> Facts:
    """All facts."""
    content = yaml.safe_load(Path(__file__).with_name("facts.yaml").read_text(encoding="utf-8"))
    return read_record(Facts, content, "facts")


def render(template: str, **values: Any) -> str:
    """Fill a template. Its filter `to_yaml` quotes a value, or writes a list or a mapping in lines,
    which `indent` moves to their depth. `in_a_line` writes them as [...] or {...}, `shell` as a
    command line."""
    environment = Environment(
        loader=PackageLoader("peagle.deploy"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    in_a_line = partial(_to_yaml, flow=True)
    environment.filters |= {"to_yaml": _to_yaml, "in_a_line": in_a_line, "shell": shlex.join}
    return environment.get_template(template).render(values)


def _to_yaml(value: Any, *, flow: bool = False) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=flow, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").removesuffix("\n")

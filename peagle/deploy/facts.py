"""Facts of others that a deployment depends on: GPUs, instance types, images, versions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from peagle.catalog_fields import read_record


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU."""

    memory: int  # GiB
    capability: str
    instances: Mapping[str, int]  # SageMaker's types and their numbers of GPUs
    fp8: bool = True
    graph_rows: int = 512  # rows of a CUDA graph, by vLLM's own limit


@dataclass(frozen=True, slots=True)
class Cuda:
    """Needs of a major version of CUDA: a driver, and SageMaker's AMI that has it."""

    driver: int
    ami: str


@dataclass(frozen=True, slots=True)
class Image:
    """A container image with vLLM. None: not known; on this machine there is no image."""

    place: str
    name: str | None = None
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
    p_eagle: Mapping[str, str]  # versions of vLLM that draft by such a head
    shutdown_timeout_since: str


@cache
def facts() -> Facts:
    """All facts."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return read_record(Facts, content, "facts")

"""What is deployed: a catalog entry, the engine that serves it, and the command for that."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.catalog import METHODS, Entry, PackagedGGUF, flag_options
from peagle.config import InputError

ENGINES = ("native", "vllm")
NO_IMAGE = "no image of peagle is published: build docker/cpu.Dockerfile or docker/cuda.Dockerfile"
KEY_VARIABLES = {"native": "PEAGLE_API_KEY", "vllm": "VLLM_API_KEY"}


class DeployFailed(RuntimeError):
    """The other side failed, or refused; the message says what was left there (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A model to be served, wherever that is."""

    name: str  # the catalog's; clients call the model so
    engine: str  # native or vllm
    target: str  # as the engine is told: hub id, or catalog name
    head: str | None  # hub id or folder; None: none, or the one the engine finds by itself
    speculative: Mapping[str, Any] | None  # vLLM's --speculative-config
    gpus: int  # 0: a CPU
    flags: Mapping[str, str | int | float | bool]  # vLLM's
    env: Mapping[str, str]

    @property
    def resource(self) -> str:
        """What everything made for it is called."""
        return resource_name(self.name)

    @property
    def key_variable(self) -> str:
        """The environment variable the engine reads its API key from."""
        return KEY_VARIABLES[self.engine]

    def command(self, host: str, port: int) -> list[str]:
        """The engine's command line; its API key comes by `key_variable`."""
        where = ["--host", host, "--port", str(port), "--served-model-name", self.name]
        if self.engine == "native":
            head = ["--head", self.head] if self.head else []
            device = ["--device", "cuda"] if self.gpus else []
            return ["peagle", "serve", self.target, *head, *device, *where]
        return ["vllm", "serve", self.target, *where, *self._vllm_options()]

    def vllm_settings(self) -> dict[str, str]:
        """vLLM's options by name, as texts; an option without a value is "true"."""
        settings = {}
        for flag, value in self.flags.items():
            if isinstance(value, bool):
                settings[flag if value else f"no-{flag}"] = "true"
            else:
                settings[flag] = str(value)
        return settings | self._beyond_flags()

    def _vllm_options(self) -> list[str]:
        options = flag_options(self.flags)
        for name, value in self._beyond_flags().items():
            options += [f"--{name}", value]
        return options

    def _beyond_flags(self) -> dict[str, str]:
        settings = {}
        if self.gpus > 1:
            settings["tensor-parallel-size"] = str(self.gpus)
        if self.speculative:
            settings["speculative-config"] = json.dumps(dict(self.speculative))
        return settings


def make_spec(name: str, entry: Entry, engine: str | None, *, remote: bool) -> Spec:
    """How a catalog entry is served. `engine` None: vLLM on other machines, ours on this one and
    for packaged targets. Raises InputError for what the engine, or another machine, cannot read."""
    packaged = isinstance(entry.target, PackagedGGUF)
    engine = engine or ("vllm" if remote and not packaged else "native")
    if engine not in ENGINES:
        raise InputError(f"--engine {engine!r}: choose {' or '.join(ENGINES)}")
    if packaged and engine == "vllm" and remote:
        raise InputError(f"--engine vllm: {name} is a GGUF file in a wheel: use --engine native")
    gpus = 0 if packaged else entry.gpus
    if engine == "native" and gpus > 1:
        raise InputError(f"--engine native: {name} takes {gpus} GPUs: use --engine vllm")
    method = next((method for method in METHODS if method in entry.heads), None)
    head = entry.heads[method] if method else None
    place = head.place if head else None
    if packaged:  # an image made of the repository has the head, and finds it by the same name
        place = None
    elif head and remote and head.hub is None:
        how = "upload it with `peagle push` and name it with `hub:` in the catalog"
        raise InputError(f"the head of {name} is the folder {head.folder}: {how}")
    elif head and place is None:
        raise InputError(f"the head of {name} is not here: no folder {head.folder}")
    speculative: dict[str, Any] | None = None
    if engine == "vllm" and head and place:
        speculative = {"method": "eagle3", "model": place, "num_speculative_tokens": head.k}
        if method == "p-eagle":
            speculative["parallel_drafting"] = True
    return Spec(
        name=name,
        engine=engine,
        target=name if isinstance(entry.target, PackagedGGUF) else entry.target,
        head=place,
        speculative=speculative,
        gpus=gpus,
        flags=entry.vllm_flags if engine == "vllm" else {},
        env=entry.vllm_env if engine == "vllm" else {},
    )


def resource_name(name: str) -> str:
    """What is made for a catalog name is called: a DNS label, as Kubernetes and SageMaker want."""
    return "peagle-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")


def new_key() -> str:
    """An API key."""
    return f"sk-{secrets.token_urlsafe(32)}"

"""A deployment: the target, its head, the engine that serves them, and its command line."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.catalog import PARALLEL_METHODS, Entry, PackagedGGUF, flag_options, speculative_config
from peagle.catalog_fields import VllmFlags
from peagle.deploy.drafting import Drafting, choose
from peagle.errors import InputError

BUILD = "build docker/cpu.Dockerfile or docker/cuda.Dockerfile"
MAX_LABEL_LENGTH = 40
FROM_CATALOG = Drafting()
KEY_VARIABLES = {"native": "PEAGLE_API_KEY", "vllm": "VLLM_API_KEY"}
ENGINES = tuple(KEY_VARIABLES)


class DeployFailed(RuntimeError):
    """The cluster or AWS failed or refused; the message lists the resources left (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A model to be served, independent of the place."""

    name: str  # the catalog's, or a hub id; the clients' name of the model
    engine: str  # one of ENGINES
    target: str  # hub id[@revision], or catalog name
    drafting: Drafting
    gpus: int  # 0: a CPU
    flags: Mapping[str, str | int | float | bool]  # the catalog's for vLLM
    env: Mapping[str, str]

    @property
    def resource(self) -> str:
        """Common name of the resources made for the deployment."""
        return resource_name(self.name)

    @property
    def model(self) -> str:
        """The target in the engine's words: vLLM reads its revision from an option."""
        return self.target if self.engine == "native" else self.target.partition("@")[0]

    @property
    def key_variable(self) -> str:
        """The environment variable the engine reads its API key from."""
        return KEY_VARIABLES[self.engine]

    @property
    def speculative(self) -> dict[str, Any] | None:
        """vLLM's --speculative-config; None without a head for vLLM."""
        head, k = self.drafting.head, self.drafting.k
        if self.engine == "native" or head is None or k is None:
            return None
        model, _, revision = head.partition("@")
        config = speculative_config(self.drafting.method in PARALLEL_METHODS, model, k)
        return config | {"revision": revision} if revision else config

    def vllm_options(self) -> dict[str, str | int | float | bool]:
        """vLLM's options by name: flags, the revision and the head; none for native."""
        options = dict(self.flags)
        revision = self.target.removeprefix(self.model).removeprefix("@")
        if revision:
            options["revision"] = revision
        if self.speculative:
            options["speculative-config"] = json.dumps(self.speculative)
        return options

    def head_options(self) -> list[str]:
        """The head as options of `peagle serve`."""
        named = {"head": self.drafting.head, "k": self.drafting.k}
        return flag_options({name: value for name, value in named.items() if value is not None})

    def serve_command(self, port: int | None, flags: VllmFlags) -> list[str]:
        """The command line on this machine. `peagle serve` reads the entry's flags for vLLM itself;
        `flags` are further ones."""
        line = ["peagle", "serve", self.name, "--engine", self.engine, *self.head_options()]
        if port is not None:
            line += ["--port", str(port)]
        return [*line, "--", *flag_options(flags)] if flags else line

    def command(self, host: str, port: int) -> list[str]:
        """The engine's command line in a container; its API key comes by `key_variable`."""
        where = ["--host", host, "--port", str(port), "--served-model-name", self.name]
        if self.engine == "vllm":
            return ["vllm", "serve", self.model, *where, *flag_options(self.vllm_options())]
        device = ["--device", "cuda"] if self.gpus else []
        options = [*self.head_options(), *device, *where, "--engine", "native"]
        return ["peagle", "serve", self.model, *options]


def make_spec(
    name: str, entry: Entry, engine: str | None, *, remote: bool, drafting: Drafting = FROM_CATALOG
) -> Spec:
    """The deployment of a catalog entry.

    The default of `engine` is vLLM on other machines, native on this one and for packaged targets.
    Raises InputError for a target or head that the engine or the other machine cannot read.
    """
    packaged = isinstance(entry.target, PackagedGGUF)
    engine = _engine(name, engine, packaged, remote)
    gpus = 0 if packaged else entry.gpus
    if engine == "native" and gpus > 1:
        why = f"{name} takes {gpus} GPUs, and the native engine runs on one"
        raise InputError(why, field="engine", value=engine, fix="choose vllm")
    chosen = choose(name, entry, drafting, remote=remote)
    flags = dict(entry.vllm_flags)
    if gpus > 1:
        flags["tensor-parallel-size"] = gpus
    target = name if isinstance(entry.target, PackagedGGUF) else entry.target
    vllm = Spec(name, engine, target, chosen, gpus, flags, entry.vllm_env)
    if engine == "native":  # which chooses K itself
        return replace(vllm, drafting=replace(chosen, k=drafting.k), flags={}, env={})
    return vllm


def _engine(name: str, engine: str | None, packaged: bool, remote: bool) -> str:
    engine = engine or ("vllm" if remote and not packaged else "native")
    if engine not in ENGINES:
        fix = f"choose {' or '.join(ENGINES)}"
        raise InputError("is unknown", field="engine", value=engine, fix=fix)
    if packaged and engine == "vllm" and remote:
        why = f"{name} is a GGUF file in a wheel, which vLLM cannot read"
        raise InputError(why, field="engine", value=engine, fix="choose native")
    return engine


def with_profile(name: str, entry: Entry, profile: str | None) -> Entry:
    """An entry with the flags of one of its profiles. Raises InputError for one it has not."""
    if profile is None:
        return entry
    if profile not in entry.profiles:
        fix = f"choose {', '.join(entry.profiles)}" if entry.profiles else "it has none"
        raise InputError(f"{name} has no such profile", field="profile", value=profile, fix=fix)
    return replace(entry, vllm_flags={**entry.vllm_flags, **entry.profiles[profile]})


def image_for(spec: Spec, image: str | None, of_vllm: str) -> str:
    """The container image: the named one, or vLLM's. Raises InputError for the native engine
    without a name, because it has no published image."""
    if image is None and spec.engine == "native":
        raise InputError("no image of peagle is published", field="image", fix=BUILD)
    return image or of_vllm


def resource_name(name: str) -> str:
    """A DNS label made of a model's name, as Kubernetes and SageMaker require."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(label) > MAX_LABEL_LENGTH:  # a digest distinguishes long names with one beginning
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        label = f"{label[: MAX_LABEL_LENGTH - 9].strip('-')}-{digest}"
    return f"peagle-{label}"

"""What is deployed: a catalog entry, the engine that serves it, and the command for that."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.catalog import Entry, PackagedGGUF, flag_options
from peagle.deploy.drafting import Chosen, Drafting, choose
from peagle.errors import InputError

ENGINES = ("native", "vllm")
NO_IMAGE = "no image of peagle is published: build docker/cpu.Dockerfile or docker/cuda.Dockerfile"
LONGEST_LABEL = 40
FROM_CATALOG = Drafting()  # as the catalog says
KEY_VARIABLES = {"native": "PEAGLE_API_KEY", "vllm": "VLLM_API_KEY"}


class DeployFailed(RuntimeError):
    """The other side failed, or refused; the message says what was left there (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A model to be served, wherever that is."""

    name: str  # the catalog's, or a hub id; clients call the model so
    engine: str  # native or vllm
    target: str  # as the engine is told: hub id, or catalog name
    head: str | None  # hub id or folder; None: none, or the one the engine finds by itself
    k: int | None  # num_speculative_tokens; None: the engine's choice
    speculative: Mapping[str, Any] | None  # vLLM's --speculative-config
    gpus: int  # 0: a CPU
    flags: Mapping[str, str | int | float | bool]  # vLLM's
    env: Mapping[str, str]

    @property
    def resource(self) -> str:
        """What everything made for it is called."""
        return resource_name(self.name)

    @property
    def model(self) -> str:
        """The target in the engine's words: vLLM reads its revision from an option."""
        return self.target if self.engine == "native" else self.target.partition("@")[0]

    @property
    def key_variable(self) -> str:
        """The environment variable the engine reads its API key from."""
        return KEY_VARIABLES[self.engine]

    def command(self, host: str, port: int) -> list[str]:
        """The engine's command line; its API key comes by `key_variable`."""
        where = ["--host", host, "--port", str(port), "--served-model-name", self.name]
        if self.engine == "native":
            device = ["--device", "cuda"] if self.gpus else []
            options = [*self.head_options(), *device, *where, "--engine", "native"]
            return ["peagle", "serve", self.model, *options]
        options = [word for name, value in self._told().items() for word in (f"--{name}", value)]
        return ["vllm", "serve", self.model, *where, *flag_options(self.flags), *options]

    def head_options(self) -> list[str]:
        """The head in the words of `peagle serve`."""
        head = ["--head", self.head] if self.head else []
        return [*head, *(["--k", str(self.k)] if self.k else [])]

    def vllm_flags(self) -> list[str]:
        """vLLM's flags, as they stand after `--` of `peagle serve --engine vllm`."""
        parallel = ["--tensor-parallel-size", str(self.gpus)] if self.gpus > 1 else []
        return [*flag_options(self.flags), *parallel]

    def vllm_settings(self) -> dict[str, str]:
        """vLLM's options by name, as texts; an option without a value is "true"."""
        settings = {}
        for flag, value in self.flags.items():
            if isinstance(value, bool):
                settings[flag if value else f"no-{flag}"] = "true"
            else:
                settings[flag] = str(value)
        return settings | self._told()

    def _told(self) -> dict[str, str]:
        """vLLM's options beside the catalog's flags."""
        settings = {}
        revision = self.target.removeprefix(self.model).removeprefix("@")
        if revision:
            settings["revision"] = revision
        if self.gpus > 1:
            settings["tensor-parallel-size"] = str(self.gpus)
        if self.speculative:
            settings["speculative-config"] = json.dumps(dict(self.speculative))
        return settings


def make_spec(
    name: str,
    entry: Entry,
    engine: str | None,
    *,
    remote: bool,
    drafting: Drafting = FROM_CATALOG,
) -> Spec:
    """How an entry is served. `engine` None: vLLM on other machines, ours on this one and for
    packaged targets. Raises InputError for what the engine, or another machine, cannot read."""
    packaged = isinstance(entry.target, PackagedGGUF)
    engine = _engine(name, engine, packaged, remote)
    gpus = 0 if packaged else entry.gpus
    if engine == "native" and gpus > 1:
        raise InputError(f"--engine native: {name} takes {gpus} GPUs: use --engine vllm")
    head = choose(name, entry, drafting, remote=remote)
    vllm = engine == "vllm"
    speculative = _speculative(head) if vllm and head and head.place else None
    return Spec(
        name=name,
        engine=engine,
        target=name if isinstance(entry.target, PackagedGGUF) else entry.target,
        head=head.place if head else None,
        k=speculative.get("num_speculative_tokens") if speculative else drafting.k,
        speculative=speculative,
        gpus=gpus,
        flags=entry.vllm_flags if vllm else {},
        env=entry.vllm_env if vllm else {},
    )


def with_profile(name: str, entry: Entry, profile: str | None) -> Entry:
    """An entry with the flags of one of its profiles. Raises InputError for one it has not."""
    if profile is None:
        return entry
    if profile not in entry.profiles:
        known = f"choose {', '.join(entry.profiles)}" if entry.profiles else "it has none"
        raise InputError(f"--profile {profile!r}: {name} has no such profile: {known}")
    return replace(entry, vllm_flags={**entry.vllm_flags, **entry.profiles[profile]})


def _engine(name: str, engine: str | None, packaged: bool, remote: bool) -> str:
    engine = engine or ("vllm" if remote and not packaged else "native")
    if engine not in ENGINES:
        raise InputError(f"--engine {engine!r}: choose {' or '.join(ENGINES)}")
    if packaged and engine == "vllm" and remote:
        raise InputError(f"--engine vllm: {name} is a GGUF file in a wheel: use --engine native")
    return engine


def _speculative(head: Chosen) -> dict[str, Any]:
    """vLLM's --speculative-config."""
    model, _, revision = str(head.place).partition("@")
    config: dict[str, Any] = {"method": "eagle3", "model": model}
    if head.k is not None:
        config["num_speculative_tokens"] = head.k
    if revision:
        config["revision"] = revision
    if head.method == "p-eagle":
        config["parallel_drafting"] = True
    return config


def resource_name(name: str) -> str:
    """What is made for a model's name is called: a DNS label, as Kubernetes and SageMaker want."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(label) > LONGEST_LABEL:  # hub ids that begin alike are told apart by a digest
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        label = f"{label[: LONGEST_LABEL - 9].strip('-')}-{digest}"
    return f"peagle-{label}"


def new_key() -> str:
    """An API key."""
    return f"sk-{secrets.token_urlsafe(32)}"

"""The one source of a deployment: the engine's command line, environment, image and hardware, made
of a catalog entry, a type of GPU, a load, a head and a place."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.catalog import (
    PARALLEL_METHODS,
    Entry,
    PackagedGGUF,
    did_you_mean,
    flag_options,
    speculative_config,
)
from peagle.catalog_fields import VllmFlags
from peagle.deploy.facts import Gpu, Image, facts
from peagle.deploy.heads import Head, choose, warn
from peagle.errors import InputError
from peagle.vllm.flags import LOAD, V1_RUNNER, WHOLE_CACHES, gpus_for, k_for_load, load_flags
from peagle.vllm.process import numbers

BUILD = "build docker/cpu.Dockerfile or docker/cuda.Dockerfile"
MAX_LABEL_LENGTH = 34  # the production-stack chart adds 22 characters, of 63 that a name has
MAX_GPUS = 8
BLACKWELL = (10,)  # its compute capability
KEY_VARIABLES = {"native": "PEAGLE_API_KEY", "vllm": "VLLM_API_KEY"}
ENGINES = tuple(KEY_VARIABLES)
PLACES = ("local", "kubernetes", "sagemaker")
ELSEWHERE = {  # choices for other places
    "local": ("gpu", "image", "instance_type"),
    "kubernetes": ("instance_type",),
    "sagemaker": (),
}


class DeployFailed(RuntimeError):
    """The cluster or AWS failed or refused; the message lists the resources left (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of the user.

    gpu: Type of GPU, such as h100; not with `to` local. Default: rtx-pro-6000 on SageMaker, h100 on
        Kubernetes.
    load: Requests at a time on each replica. vLLM takes no more, and drafts fewer tokens for more
        requests. Default: the catalog's, else 64.
    head: Draft head: a hub id (owner/name@revision), a folder with `to` local, or a folder on S3
        with `to` sagemaker (s3://BUCKET/PREFIX). Default: the catalog's head for the model.
    method: Drafting method, p-eagle or eagle3: chooses among the catalog's heads. Default: p-eagle
        where there is such a head.
    k: Number of draft tokens per round (num_speculative_tokens). Default: with vllm the head's, or
        fewer for a large `load`; chosen every round with native.
    profile: Profile of the catalog entry, such as benchmark: more vLLM flags. Default: none.
    engine: Engine: native or vllm. Default: with `to` local, vllm on a machine with a GPU and an
        installed vLLM, else native; elsewhere vllm (native for packaged models).
    image: Container image, not with `to` local. Default: an image of vLLM; `engine` native needs
        one.
    instance_type: Instance type, with `to` sagemaker, such as ml.p5.4xlarge. Default: the smallest
        one with such GPUs.
    """

    gpu: str | None = None
    load: int | None = None
    head: str | None = None
    method: str | None = None
    k: int | None = None
    profile: str | None = None
    engine: str | None = None
    image: str | None = None
    instance_type: str | None = None

    def __post_init__(self) -> None:
        for name in ("load", "k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError("must be at least 1", field=name, value=value)
        if self.engine not in (None, *ENGINES):
            fix = f"choose {' or '.join(ENGINES)}"
            raise InputError("is unknown", field="engine", value=self.engine, fix=fix)


DEFAULTS = Choices()


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment, decided; places only write it in their own words."""

    name: str  # the catalog's, or a hub id; the clients' name of the model
    engine: str  # one of ENGINES
    model: str  # hub id, or the catalog's name of a packaged target
    revision: str | None
    head: str | None  # hub id[@revision], s3:// folder, or a folder of this machine
    method: str | None
    k: int | None  # draft tokens per round; None: the engine chooses
    gpus: int  # 0: a CPU
    gpu: str | None  # a name in facts.yaml
    options: VllmFlags  # of the engine, by name
    env: Mapping[str, str]
    image: str | None  # None on this machine; AWS's own without its registry
    vllm: str | None  # version in the image; None: another engine, or not known
    cuda: str | None
    ami: str | None
    instance_type: str | None

    @property
    def resource(self) -> str:
        """Common name of the resources made for the deployment: a DNS label."""
        return resource_name(self.name)

    @property
    def key_variable(self) -> str:
        """The environment variable the engine reads its API key from."""
        return KEY_VARIABLES[self.engine]

    @property
    def program(self) -> tuple[str, ...]:
        """The program, before `argv`."""
        return ("vllm" if self.engine == "vllm" else "peagle", "serve")

    @property
    def argv(self) -> tuple[str, ...]:
        """Arguments after the program, without host and port. Our images take them, in a shell's
        words, as $PEAGLE_SERVE."""
        pinned = self.engine == "native" and self.revision
        model = f"{self.model}@{self.revision}" if pinned else self.model
        return (model, *flag_options(self.options))


def make_plan(name: str, entry: Entry, place: str, choices: Choices = DEFAULTS) -> Plan:
    """Decide a deployment of a catalog entry. Raises InputError for choices that do not start."""
    for field in ELSEWHERE[place]:
        if value := getattr(choices, field):
            raise InputError(
                f"does nothing on {place}", field=field, value=value, fix="leave it out"
            )
    engine = _engine(name, entry, place, choices.engine)
    packaged = isinstance(entry.target, PackagedGGUF)
    head = choose(name, entry, Head(choices.head, choices.method), place=place, engine=engine)
    if choices.k is not None and head == Head():
        why, fix = f"{name} has no head", "name one with `head`"
        raise InputError(why, field="k", value=choices.k, fix=fix)
    gpu = None if packaged or place == "local" else _gpu(choices, place)
    hardware = facts().gpus[gpu] if gpu else None
    gpus = _gpus(name, entry, gpu) if gpu else 0
    if engine == "native" and gpus > 1:
        why = f"{name} takes {gpus} GPUs, and the native engine runs on one"
        raise InputError(why, field="engine", value=engine, fix="choose vllm")
    target = name if isinstance(entry.target, PackagedGGUF) else entry.target
    model, _, revision = target.partition("@")
    image = _image(place, choices.image, engine, head)
    plan = Plan(
        name=name, engine=engine, model=model, revision=revision or None, head=head.name,
        method=head.method, k=choices.k, gpus=gpus, gpu=gpu, options={}, env={},
        image=image.name, vllm=image.vllm, cuda=image.cuda, ami=_ami(image, hardware),
        instance_type=_instance(choices.instance_type, gpu, gpus) if place == "sagemaker" else None,
    )  # fmt: skip
    if engine == "native":
        device = "cuda" if gpus else None
        given = {"head": head.name, "k": choices.k, "device": device, "served-model-name": name}
        options = {key: value for key, value in given.items() if value is not None}
        return replace(plan, options=options | {"engine": engine})
    _check_version(plan, entry, head, place)
    return _with_vllm(plan, entry, head, choices, hardware)


def _with_vllm(plan: Plan, entry: Entry, head: Head, choices: Choices, gpu: Gpu | None) -> Plan:
    """The plan with vLLM's options and variables."""
    load = choices.load or int(entry.vllm_flags.get("max-num-seqs", LOAD))
    rows = (gpu.graph_rows,) if gpu else ()
    k = choices.k or (head.k and k_for_load(head.k, load, *rows))
    profile = _profile(plan, entry, choices.profile)
    options: dict[str, Any] = {"served-model-name": plan.name}
    if plan.revision:
        options["revision"] = plan.revision
    options |= {**load_flags(load, k, plan.gpus), **entry.vllm_flags, "max-num-seqs": load}
    options |= profile
    if head.whole_caches:
        options |= WHOLE_CACHES
    if gpu and not gpu.fp8 and str(options.get("kv-cache-dtype")).startswith("fp8"):
        can = ", ".join(each for each, other in facts().gpus.items() if other.fp8)
        raise InputError("has no fp8", field="gpu", value=plan.gpu, fix=f"choose one of {can}")
    if head.name and k:
        options["speculative-config"] = json.dumps(_speculative(head, k))
    env = {**entry.vllm_env, **(V1_RUNNER if head.v1 else {})}
    return replace(plan, k=k, options=options, env=env)


def _speculative(head: Head, k: int) -> dict[str, Any]:
    """vLLM's --speculative-config."""
    assert head.name is not None
    model, _, revision = head.name.partition("@")
    config = speculative_config(head.method in PARALLEL_METHODS, model, k)
    return config | {"revision": revision} if revision else config


def _engine(name: str, entry: Entry, place: str, engine: str | None) -> str:
    packaged = isinstance(entry.target, PackagedGGUF)
    if packaged and engine == "vllm" and place != "local":
        why = f"{name} is a GGUF file in a wheel, which vLLM cannot read"
        raise InputError(why, field="engine", value=engine, fix="choose native")
    return engine or ("native" if packaged or place == "local" else "vllm")


def _gpu(choices: Choices, place: str) -> str:
    """The named GPU, else that of the instance type, else the place's default."""
    known, kind = facts().gpus, choices.instance_type
    if choices.gpu is not None and choices.gpu not in known:
        fix = f"choose one of {', '.join(known)}"
        raise InputError("is not a known type", field="gpu", value=choices.gpu, fix=fix)
    if kind is None or place != "sagemaker":
        return choices.gpu or facts().default_gpu[place]
    instances = {each: name for name, gpu in known.items() for each in gpu.instances}
    if kind not in instances:
        such = next(iter(known[facts().default_gpu[place]].instances))
        fix = did_you_mean(kind, instances) or f"choose one such as {such}"
        raise InputError("is no known type with a GPU", field="instance_type", value=kind, fix=fix)
    if choices.gpu not in (None, instances[kind]):
        why, fix = f"has the GPU {instances[kind]}, not {choices.gpu}", "leave out `gpu`"
        raise InputError(why, field="instance_type", value=kind, fix=fix)
    return instances[kind]


def _gpus(name: str, entry: Entry, gpu: str) -> int:
    """Number of GPUs that hold the target. Raises InputError for more than an instance has."""
    memory = facts().gpus[gpu].memory
    gpus = gpus_for(entry.gpu_memory, memory)
    if gpus > MAX_GPUS:
        why = f"{name} needs {entry.gpu_memory} GiB, {MAX_GPUS} of these have {MAX_GPUS * memory}"
        raise InputError(why, field="gpu", value=gpu, fix="choose a larger one")
    return gpus


def _instance(kind: str | None, gpu: str | None, gpus: int) -> str:
    """The named instance type, if it has the GPUs, else the smallest."""
    if gpu is None:
        return kind or facts().cpu_instance
    instances = facts().gpus[gpu].instances
    fitting = next(each for each, count in instances.items() if count >= gpus)
    if kind is not None and instances[kind] < gpus:
        why = f"has {instances[kind]} GPU of the {gpus} needed"
        raise InputError(why, field="instance_type", value=kind, fix=f"choose {fitting}")
    return kind or fitting


def _image(place: str, named: str | None, engine: str, head: Head) -> Image:
    """The named image, with the versions that are known or written in its tag, or the default."""
    if place == "local":
        return Image(place)
    if named is None:
        if engine == "native":
            raise InputError("no image of peagle is published", field="image", fix=BUILD)
        images = [image for image in facts().images if image.place == place]
        return next((image for image in images if _is_before(image, head.below_vllm)), images[0])
    for image in facts().images:
        if named == image.name or named.endswith(f"/{image.name}"):
            return replace(image, name=named)
    tag = named.rpartition(":")[2] if engine == "vllm" else ""
    vllm = re.search(r"\bv?(\d+\.\d+\.\d+)", tag)
    cuda = re.search(r"\bcu(\d\d)(\d)", tag)
    return Image(place, named, vllm and vllm[1], cuda and f"{cuda[1]}.{cuda[2]}")


def _is_before(image: Image, release: str | None) -> bool:
    return release is None or numbers(image.vllm) < numbers(release)


def _ami(image: Image, gpu: Gpu | None) -> str | None:
    """SageMaker's AMI. Newer drivers run images of an older CUDA, so it is the newest for an image
    of unknown CUDA, and for GPUs that no older one drives."""
    if gpu is None or image.place != "sagemaker":
        return None
    *_, newest = facts().cuda.values()
    known = facts().cuda.get((image.cuda or "").partition(".")[0], newest)
    return newest.ami if numbers(gpu.capability) >= BLACKWELL else known.ami


def _check_version(plan: Plan, entry: Entry, head: Head, place: str) -> None:
    """Raises InputError for an image whose vLLM is too old. Warns of one that may be too new."""
    if plan.image is None:
        return
    since = max(head.min_vllm or "0", entry.min_vllm or "0", key=numbers)
    if plan.vllm is None:
        warn(f"image {plan.image}: its tag names no version; it must have vLLM {since} or newer")
    elif numbers(plan.vllm) < numbers(since):
        can = [each for each in facts().images
               if each.place == place and numbers(each.vllm) >= numbers(since)]  # fmt: skip
        why = f"its vLLM is {plan.vllm}; {plan.name} with the head {head.name} needs {since}"
        nearest = min(can, key=lambda each: numbers(each.vllm)).name
        raise InputError(why, field="image", value=plan.image, fix=f"choose {nearest}")
    elif head.below_vllm and numbers(plan.vllm) >= numbers(head.below_vllm):
        why = f"its vLLM is {plan.vllm}; the head {head.name} needs one before {head.below_vllm}"
        fix = f"choose {_image(place, None, plan.engine, head).name}, or export the head"
        raise InputError(why, field="image", value=plan.image, fix=fix)
    elif head.v1 and numbers(plan.vllm) > numbers(facts().p_eagle["tried"]):
        tried = f"P-EAGLE was tried up to vLLM {facts().p_eagle['tried']}"
        warn(f"image {plan.image}: {tried}; newer ones may refuse it")


def _profile(plan: Plan, entry: Entry, profile: str | None) -> VllmFlags:
    """The flags of a profile. Raises InputError for one that the entry has not, or for another
    GPU's."""
    if profile is None:
        return {}
    if profile not in entry.profiles:
        fix = f"choose {', '.join(entry.profiles)}" if entry.profiles else "it has none"
        why = f"{plan.name} has no such profile"
        raise InputError(why, field="profile", value=profile, fix=fix)
    if profile in facts().gpus and plan.gpu not in (None, profile):
        why, fix = f"is for that GPU, not for {plan.gpu}", f"set `gpu` to {profile}"
        raise InputError(why, field="profile", value=profile, fix=fix)
    return entry.profiles[profile]


def check_replicas(replicas: int, max_replicas: int | None) -> None:
    """Raises InputError for numbers of replicas that cannot be."""
    if replicas < 1:
        raise InputError("must be at least 1", field="replicas", value=replicas)
    if max_replicas is not None and max_replicas < replicas:
        why = f"must be at least `replicas` ({replicas})"
        raise InputError(why, field="max_replicas", value=max_replicas)


def resource_name(name: str) -> str:
    """A DNS label made of a model's name, as Kubernetes and SageMaker require."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(label) > MAX_LABEL_LENGTH:  # a digest distinguishes long names with one beginning
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        label = f"{label[: MAX_LABEL_LENGTH - 9].strip('-')}-{digest}"
    return f"peagle-{label}"

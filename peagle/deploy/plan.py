"""The one source of a deployment: the engine's command line, environment, image and hardware, made
of a catalog entry, a type of GPU, a load, a head and a place. (This machine needs none: there it is
a line of `peagle serve`.)"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from peagle.catalog import PARALLEL_METHODS, Entry, PackagedGGUF, did_you_mean
from peagle.catalog_fields import VllmFlags
from peagle.deploy.data import Image, facts
from peagle.deploy.heads import RemoteHead, choose, warn
from peagle.errors import InputError, check_at_least
from peagle.vllm import flags
from peagle.vllm.process import Engine, numbers

MAX_LABEL_LENGTH = 34  # the production-stack chart adds 22 characters, of 63 that a name has
MAX_GPUS = 8
BLACKWELL = (10,)  # its compute capability
KEY_VARIABLES = {"native": "PEAGLE_API_KEY", "vllm": "VLLM_API_KEY"}


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
    replicas: Number of replicas (on SageMaker: instances), not with `to` local; the minimum if they
        are scaled.
    max_replicas: Maximum number of replicas: above `replicas`, more are started for waiting
        requests. Default: `replicas`.
    """

    gpu: str | None = None
    load: int | None = None
    head: str | None = None
    method: Literal["p-eagle", "eagle3"] | None = None
    k: int | None = None
    profile: str | None = None
    engine: Engine | None = None
    image: str | None = None
    instance_type: str | None = None
    replicas: int = 1
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        check_at_least(1, load=self.load, k=self.k, replicas=self.replicas)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            why = f"must be at least `replicas` ({self.replicas})"
            raise InputError(why, field="max_replicas", value=self.max_replicas)


class Hardware(NamedTuple):
    """GPUs, and the instance type that has them."""

    gpu: str | None  # a name in facts.yaml; None: a CPU
    gpus: int
    instance_type: str | None  # of SageMaker


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment, decided; places only write it in their own words."""

    name: str  # the catalog's, or a hub id; the clients' name of the model
    engine: Engine
    model: str  # hub id, or the catalog's name of a packaged target
    revision: str | None
    head: str | None  # hub id[@revision] or s3:// folder
    k: int | None  # draft tokens per round; None: the engine chooses
    gpus: int  # 0: a CPU
    gpu: str | None  # a name in facts.yaml
    options: VllmFlags  # of the engine, by name
    env: Mapping[str, str]
    image: str  # AWS's own without its registry
    cuda: str | None  # version in the image; None: not known
    ami: str | None
    instance_type: str | None
    replicas: int
    max_replicas: int | None  # None: always `replicas`

    @property
    def resource(self) -> str:
        """Common name of the resources made for the deployment: a DNS label."""
        return resource_name(self.name)

    @property
    def key_variable(self) -> str:
        """The environment variable the engine reads its API key from."""
        return KEY_VARIABLES[self.engine]

    @property
    def argv(self) -> tuple[str, ...]:
        """Arguments of `vllm serve` or `peagle serve`, without host and port. Our images take them,
        in a shell's words, as $PEAGLE_SERVE."""
        pinned = self.engine == "native" and self.revision
        model = f"{self.model}@{self.revision}" if pinned else self.model
        return (model, *flags.flag_options(self.options))


def make_plan(name: str, entry: Entry, place: str, choices: Choices) -> Plan:
    """Decide a deployment of a catalog entry. Raises InputError for choices that do not start."""
    packaged = isinstance(entry.target, PackagedGGUF)
    if packaged and choices.engine == "vllm":
        why = f"{name} is a GGUF file in a wheel, which vLLM cannot read"
        raise InputError(why, field="engine", value="vllm", fix="choose native")
    engine: Engine = choices.engine or ("native" if packaged else "vllm")
    asked = RemoteHead(choices.head, choices.method)
    head = choose(name, entry, asked, place=place, engine=engine)
    if choices.k is not None and head == RemoteHead():
        why = f"{name} has no head"
        raise InputError(why, field="k", value=choices.k, fix="name one with `head`")
    hardware = _hardware(name, entry, place, choices)
    if engine == "native" and hardware.gpus > 1:
        why = f"{name} takes {hardware.gpus} GPUs, and the native engine runs on one"
        raise InputError(why, field="engine", value=engine, fix="choose vllm")
    profile = profile_flags(name, entry, choices.profile, engine, hardware.gpu)
    image = _image(entry, head, place, choices.image, engine)
    target = name if isinstance(entry.target, PackagedGGUF) else entry.target
    model, _, revision = target.partition("@")
    plan = Plan(
        name=name, engine=engine, model=model, revision=revision or None, head=head.name,
        k=choices.k, gpus=hardware.gpus, gpu=hardware.gpu, options={}, env={},
        image=image.name, cuda=image.cuda, ami=_ami(image, hardware.gpu),
        instance_type=hardware.instance_type if place == "sagemaker" else None,
        replicas=choices.replicas, max_replicas=choices.max_replicas,
    )  # fmt: skip
    if engine == "vllm":
        return _with_vllm(plan, entry, head, choices.load or flags.usual_load(entry), profile)
    device = "cuda" if plan.gpus else None
    options = {"head": head.name, "k": plan.k, "max-batch": choices.load, "device": device}
    given = {option: value for option, value in options.items() if value is not None}
    return replace(plan, options=given | {"served-model-name": name, "engine": engine})


def _with_vllm(plan: Plan, entry: Entry, head: RemoteHead, load: int, profile: VllmFlags) -> Plan:
    """The plan with vLLM's options and variables."""
    memory = facts().gpus[plan.gpu].memory if plan.gpu else None
    k = plan.k or (head.k and flags.k_for_load(head.k, load, memory))
    options: dict[str, Any] = {"served-model-name": plan.name}
    if plan.revision:
        options["revision"] = plan.revision
    options |= {**flags.load_flags(load, k, plan.gpus, memory), **entry.vllm_flags}
    options |= {"max-num-seqs": load, **profile, **head.flags}
    if head.name and k:
        model, _, revision = head.name.partition("@")
        drafts = flags.speculative_config(head.method in PARALLEL_METHODS, model, k)
        if revision:
            drafts["revision"] = revision
        options["speculative-config"] = json.dumps(drafts)
    env = {**entry.vllm_env, **(flags.V1_RUNNER if head.v1 else {})}
    return replace(plan, k=k, options=options, env=env)


def _hardware(name: str, entry: Entry, place: str, choices: Choices) -> Hardware:
    """The GPUs that hold the target, and the named instance type, else the smallest with them."""
    kind = choices.instance_type
    if isinstance(entry.target, PackagedGGUF):
        if choices.gpu is not None:
            why = f"{name} runs on a CPU"
            raise InputError(why, field="gpu", value=choices.gpu, fix="leave it out")
        return Hardware(None, 0, kind or facts().cpu_instance)
    gpu = _gpu(choices, place)
    hardware = facts().gpus[gpu]
    if entry.gpu_memory is None:
        warn(f"{name} takes one {gpu}: the catalog does not say how much memory it needs")
    gpus = flags.gpus_for(entry.gpu_memory, hardware.memory)
    if gpus > MAX_GPUS:
        why = f"{name} needs {entry.gpu_memory} GiB, more than {MAX_GPUS} of these have"
        raise InputError(why, field="gpu", value=gpu, fix="choose a larger one")
    fitting = next(each for each, count in hardware.instances.items() if count >= gpus)
    if kind is not None and hardware.instances[kind] < gpus:
        why = f"has {hardware.instances[kind]} GPU of the {gpus} needed"
        raise InputError(why, field="instance_type", value=kind, fix=f"choose {fitting}")
    kind = kind or fitting
    if place == "sagemaker" and gpus < hardware.instances[kind]:
        warn(f"instance type {kind}: {name} uses {gpus} of its {hardware.instances[kind]} GPUs")
    return Hardware(gpu, gpus, kind)


def _gpu(choices: Choices, place: str) -> str:
    """The named GPU, else that of the instance type, else the place's default."""
    known = facts().gpus
    kind = choices.instance_type
    if choices.gpu is not None and choices.gpu not in known:
        fix = f"choose one of {', '.join(known)}"
        raise InputError("is not a known type", field="gpu", value=choices.gpu, fix=fix)
    gpu = choices.gpu or facts().default_gpu[place]
    if kind is None:
        return gpu
    instances = {each: name for name, hardware in known.items()
                 for each in hardware.instances if choices.gpu in (None, name)}  # fmt: skip
    if kind not in instances:
        such = next(iter(known[gpu].instances))
        fix = did_you_mean(kind, instances) or f"choose one such as {such}"
        why = "is no known type with such a GPU"
        raise InputError(why, field="instance_type", value=kind, fix=fix)
    return instances[kind]


def _image(entry: Entry, head: RemoteHead, place: str, named: str | None, engine: str) -> Image:
    """The named image, else the newest known one of vLLM that reads target and head. Raises
    InputError for one that does not; warns of one that may not."""
    if named and ":" not in named.rpartition("/")[2]:
        raise InputError("has no tag", field="image", value=named, fix=f"name one, as {named}:TAG")
    if engine == "native":
        if named is None:
            fix = "build docker/cpu.Dockerfile or docker/cuda.Dockerfile"
            raise InputError("no image of peagle is published", field="image", fix=fix)
        return Image(place, named)
    since = max(facts().oldest_vllm, head.min_vllm or "", entry.min_vllm or "", key=numbers)
    below = head.below_vllm

    def reads(image: Image) -> bool:
        return numbers(since) <= numbers(image.vllm) < numbers(below or "999")

    can = [image for image in facts().images if image.place == place and reads(image)]
    image = _known_image(place, named) if named else next(iter(can), Image(place, ""))
    if not image.name or (image.vllm is not None and not reads(image)):
        span = f"{since} or newer is needed" + (f", and older than {below}" if below else "")
        why = f"its vLLM is {image.vllm}; {span}" if named else f"vLLM {span}"
        nearest = can[-1 if numbers(image.vllm) < numbers(since) else 0].name if can else "another"
        raise InputError(why, field="image", value=named, fix=f"choose {nearest}")
    if image.vllm is None:
        warn(f"image {named}: its tag names no version; it must have vLLM {since} or newer")
    elif head.v1 and numbers(image.vllm) > numbers(facts().p_eagle_tried):
        tried = f"P-EAGLE was tried up to vLLM {facts().p_eagle_tried}"
        warn(f"image {named}: {tried}; newer ones may refuse it")
    return image


def _known_image(place: str, named: str) -> Image:
    """An image with the versions that are known, or written in its tag."""
    for image in facts().images:
        if named == image.name or named.endswith(f"/{image.name}"):
            return replace(image, name=named, place=place)
    tag = named.rpartition(":")[2]
    vllm = re.search(r"\bv?(\d+\.\d+\.\d+)", tag)
    cuda = re.search(r"\bcu(\d\d)(\d)", tag)
    return Image(place, named, vllm and vllm[1], cuda and f"{cuda[1]}.{cuda[2]}")


def _ami(image: Image, gpu: str | None) -> str | None:
    """SageMaker's AMI. Newer drivers run images of an older CUDA, so it is the newest for an image
    of unknown CUDA, and for GPUs that no older one drives."""
    if gpu is None or image.place != "sagemaker":
        return None
    *_, newest = facts().cuda.values()
    known = facts().cuda.get((image.cuda or "").partition(".")[0], newest)
    return newest.ami if numbers(facts().gpus[gpu].capability) >= BLACKWELL else known.ami


def profile_flags(
    name: str, entry: Entry, profile: str | None, engine: Engine | None, gpu: str | None
) -> VllmFlags:
    """The flags of a profile. Raises InputError for one that the entry has not, or for another
    engine or GPU."""
    if profile is None:
        return {}
    if engine == "native":
        why = "profiles are flags of vLLM"
        fix = "set `engine` to vllm"
    elif profile not in entry.profiles:
        why = f"{name} has no such profile"
        fix = f"choose {', '.join(entry.profiles)}" if entry.profiles else "it has none"
    elif profile in facts().gpus and gpu not in (None, profile):
        why = f"is for that GPU, not for {gpu}"
        fix = f"set `gpu` to {profile}"
    else:
        return entry.profiles[profile]
    raise InputError(why, field="profile", value=profile, fix=fix)


def resource_name(name: str) -> str:
    """A DNS label made of a model's name, as Kubernetes and SageMaker require."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(label) > MAX_LABEL_LENGTH:  # a digest distinguishes long names with one beginning
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        label = f"{label[: MAX_LABEL_LENGTH - 9].strip('-')}-{digest}"
    return f"peagle-{label}"

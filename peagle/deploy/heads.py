"""The head of a deployment: the one that is named, or the catalog's, and what vLLM needs for it."""

import warnings
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from peagle.catalog import METHODS, PARALLEL_METHODS, Entry, PackagedGGUF, how_to_get, load_catalog
from peagle.catalog_fields import is_hub_id
from peagle.deploy.facts import facts
from peagle.errors import InputError, InputWarning

S3 = "s3://"


@dataclass(frozen=True, slots=True)
class Head:
    """A head, or none: then all are None."""

    name: str | None = None  # hub id[@revision], s3:// folder, or a folder of this machine
    method: str | None = None
    k: int | None = None  # draft tokens per round that suit it; None: not known here
    min_vllm: str | None = None
    below_vllm: str | None = None  # the first vLLM that does not read it any more
    v1: bool = False  # whether only the V1 model runner drafts by it
    whole_caches: bool = False  # whether vLLM must not split the KV cache


def choose(name: str, entry: Entry, asked: Head, *, place: str, engine: str) -> Head:
    """The named head, else the catalog's head of the named method, else the catalog's best.

    Warns if there is none. Raises InputError for a head that the engine there cannot read.
    """
    if asked.method not in (None, *METHODS):
        fix = f"choose {' or '.join(METHODS)}"
        raise InputError("is unknown", field="method", value=asked.method, fix=fix)
    if asked.name is not None:
        return _named(asked.name, asked.method, entry, place, engine)
    method = asked.method or next((each for each in METHODS if each in entry.heads), None)
    if method is None:
        warn(f"{name} has no head: nothing will draft; name one with `head`")
        return Head()
    if method not in entry.heads:
        why, fix = f"the catalog has no such head for {name}", "name one with `head`"
        raise InputError(why, field="method", value=method, fix=fix)
    known = entry.heads[method]
    if asked.method is None and method != METHODS[0] and known.source:
        public = f"the public {method} head {known.hub} drafts (source: {known.source})"
        warn(f"{name} has no {METHODS[0]} head: {public}")
    return _of_catalog(name, entry, method, place)


def _of_catalog(name: str, entry: Entry, method: str, place: str) -> Head:
    known = entry.heads[method]
    if isinstance(entry.target, PackagedGGUF) and method == METHODS[0]:
        # The engine finds it by the target's name; an image made of the repository has it.
        if place == "local" and known.location is None:
            warn(f"the {method} head of {name} is not here: {how_to_get(known)}")
        return Head(method=method)
    if place != "local" and known.hub is None:
        why, fix = "other machines cannot read a folder", "upload it with `hf upload`"
        fix += " and name it with `hub:` in the catalog"
        raise InputError(why, field="head", value=known.folder, fix=fix)
    if known.location is None:
        why = f"the {method} head of {name} is not here"
        raise InputError(why, field="head", fix=how_to_get(known))
    parallel = method in PARALLEL_METHODS
    since = known.min_vllm or (facts().p_eagle["since"] if parallel else None)
    return Head(known.location, method, known.k, since, known.below_vllm, v1=parallel)


def _named(head: str, method: str | None, entry: Entry, place: str, engine: str) -> Head:
    """The head of a folder, a hub id or a folder on S3. On this machine the engine reads its method
    and its depth itself."""
    folder = Path(expanduser(head))
    if folder.is_dir():
        if place != "local":
            why, fix = "other machines cannot read a folder", "upload it with `hf upload`"
            raise InputError(why, field="head", value=head, fix=f"{fix} and give its hub id")
        return Head(str(folder.resolve()), method)
    if head.startswith(S3):
        if place != "sagemaker" or engine != "vllm":
            why = "only vLLM on SageMaker reads a head from S3"
            raise InputError(why, field="head", value=head, fix="upload it with `hf upload`")
    elif not is_hub_id(head):
        why = "no such folder, and no hub id (owner/name[@revision])"
        raise InputError(why, field="head", value=head)
    for each in (entry, *load_catalog().values()):
        for kind, known in each.heads.items():
            if known.hub == head and method in (None, kind):
                return _of_catalog(head, each, kind, place)
    if place == "local" or engine == "native":
        return Head(head, method)
    return _read(head, method, entry)


def _read(head: str, method: str | None, entry: Entry) -> Head:
    """A head elsewhere by its config.json, as vLLM will read it."""
    from peagle.vllm.head import check_for_vllm, target_config  # noqa: PLC0415 (needs torch)
    from peagle.vllm.serve import WIDER_GROUPS, cache_flags  # noqa: PLC0415

    needs = check_for_vllm(head)
    if method not in (None, needs.method):
        raise InputError(f"its method is {needs.method}, not {method}", field="head", value=head)
    if needs.lost:
        warn(f"head {head}: vLLM drafts without {needs.lost}")
    target = target_config(str(entry.target))
    return Head(
        head,
        needs.method,
        needs.k,
        needs.since.version,
        needs.below,
        v1=bool(needs.environ),
        whole_caches=bool(cache_flags(needs.drafter, target, WIDER_GROUPS)),
    )


def warn(text: str) -> None:
    """Warn of what a deployment will not do."""
    warnings.warn(InputWarning(text), stacklevel=3)

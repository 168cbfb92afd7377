"""The head of a deployment: the one that is named, or the catalog's, and what vLLM needs for it."""

import warnings
from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path

from peagle.catalog import METHODS, PARALLEL_METHODS, Entry, PackagedGGUF, load_catalog
from peagle.catalog_fields import VllmFlags, is_hub_id
from peagle.errors import InputError, InputWarning
from peagle.vllm.flags import P_EAGLE_SINCE


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """A head, or none: then all are None or empty."""

    name: str | None = None  # hub id[@revision] or s3:// folder
    method: str | None = None
    k: int | None = None  # draft tokens per round that suit it; None: not known here
    min_vllm: str | None = None
    below_vllm: str | None = None  # the first vLLM that does not read it any more
    v1: bool = False  # whether only the V1 model runner drafts by it
    flags: VllmFlags = field(default_factory=dict)  # without which vLLM does not load it


def choose(name: str, entry: Entry, asked: RemoteHead, *, place: str, engine: str) -> RemoteHead:
    """The named head, else the catalog's head of the named method, else the catalog's best.

    Warns if there is none. Raises InputError for a head that the engine there cannot read.
    """
    if asked.name is not None:
        return _named(asked.name, asked.method, entry, place, engine)
    method = asked.method or next((each for each in METHODS if each in entry.heads), None)
    if method is None:
        warn(f"{name} has no head: nothing will draft; name one with `head`")
        return RemoteHead()
    if method not in entry.heads:
        why = f"the catalog has no such head for {name}"
        raise InputError(why, field="method", value=method, fix="name one with `head`")
    known = entry.heads[method]
    if asked.method is None and method != METHODS[0] and known.source:
        public = f"the public {method} head {known.hub} drafts (source: {known.source})"
        warn(f"{name} has no {METHODS[0]} head: {public}")
    return _of_catalog(entry, method)


def _of_catalog(entry: Entry, method: str) -> RemoteHead:
    known = entry.heads[method]
    if isinstance(entry.target, PackagedGGUF) and method == METHODS[0]:
        return RemoteHead(method=method)  # in the image, where the target's name finds it
    if known.hub is None:
        raise _elsewhere(str(known.folder))
    parallel = method in PARALLEL_METHODS
    since = known.min_vllm or (P_EAGLE_SINCE if parallel else None)
    return RemoteHead(known.hub, method, known.k, since, known.below_vllm, v1=parallel)


def _elsewhere(head: str) -> InputError:
    why = "other machines read hub ids (owner/name), and vLLM on SageMaker s3://BUCKET/FOLDER"
    return InputError(why, field="head", value=head, fix="upload it with `hf upload`")


def _named(head: str, method: str | None, entry: Entry, place: str, engine: str) -> RemoteHead:
    """The head with a hub id or in a folder on S3."""
    on_s3 = head.startswith("s3://") and place == "sagemaker" and engine == "vllm"
    there = on_s3 or is_hub_id(head)
    if not there or Path(expanduser(head)).is_dir():
        raise _elsewhere(head)
    for each in (entry, *load_catalog().values()):
        for kind, known in each.heads.items():
            if known.hub == head and method in (None, kind):
                if each.target != entry.target:
                    warn(f"head {head}: it is for {each.target}, and may not fit {entry.target}")
                return _of_catalog(each, kind)
    return RemoteHead(head, method) if engine == "native" else _read(head, method, entry)


def _read(head: str, method: str | None, entry: Entry) -> RemoteHead:
    """A head elsewhere by its config.json, as vLLM will read it. Raises InputError for the head of
    another target; warns where that cannot be seen, as with a target on S3."""
    from peagle.vllm.head import check_for_vllm, check_sizes, target_config  # noqa: PLC0415
    from peagle.vllm.serve import WIDER_GROUPS, cache_flags  # noqa: PLC0415 (both need torch)

    needs = check_for_vllm(head)
    if method not in (None, needs.method):
        raise InputError(f"its method is {needs.method}, not {method}", field="head", value=head)
    if needs.lost:
        warn(f"head {head}: vLLM drafts without {needs.lost}")
    target = None
    try:
        target = target_config(str(entry.target))
    except InputError as error:
        unread = "its sizes and the layout of its KV cache are not compared with the target's"
        warn(f"head {head}: {unread}, whose config.json cannot be read ({error.why})")
    if target is not None:
        check_sizes(needs.keys, target)
    whole = cache_flags(needs.drafter, target, WIDER_GROUPS)
    needed = (needs.method, needs.k, needs.since.version, needs.below)
    return RemoteHead(head, *needed, v1=bool(needs.environ), flags=whole)


def warn(text: str) -> None:
    """Warn of what a deployment will not do."""
    warnings.warn(InputWarning(text), stacklevel=3)

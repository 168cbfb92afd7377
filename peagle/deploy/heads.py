"""The head of a deployment: the one that is named, or the catalog's, and what vLLM needs for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from tempfile import TemporaryDirectory

from peagle.catalog import METHODS, PARALLEL_METHODS, Entry, PackagedGGUF, how_to_get, load_catalog
from peagle.catalog_fields import is_hub_id
from peagle.deploy.facts import facts
from peagle.errors import InputError, InputWarning, first_line

S3 = "s3://"


@dataclass(frozen=True, slots=True)
class Head:
    """A head, or none: then all are None."""

    name: str | None = None  # hub id[@revision], s3:// folder, or a folder of this machine
    method: str | None = None
    k: int | None = None  # draft tokens per round that suit it; None: not known here
    min_vllm: str | None = None
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
        _warn(f"{name} has no head: nothing will draft; name one with `head`")
        return Head()
    if method not in entry.heads:
        why, fix = f"the catalog has no such head for {name}", "name one with `head`"
        raise InputError(why, field="method", value=method, fix=fix)
    known = entry.heads[method]
    if asked.method is None and method != METHODS[0] and known.source:
        public = f"the public {method} head {known.hub} drafts (source: {known.source})"
        _warn(f"{name} has no {METHODS[0]} head: {public}")
    return _of_catalog(name, entry, method, place)


def _of_catalog(name: str, entry: Entry, method: str, place: str) -> Head:
    known = entry.heads[method]
    if isinstance(entry.target, PackagedGGUF) and method == METHODS[0]:
        # The engine finds it by the target's name; an image made of the repository has it.
        if place == "local" and known.location is None:
            _warn(f"the {method} head of {name} is not here: {how_to_get(known)}")
        return Head(method=method)
    if place != "local" and known.hub is None:
        why, fix = "other machines cannot read a folder", "upload it with `hf upload`"
        fix += " and name it with `hub:` in the catalog"
        raise InputError(why, field="head", value=known.folder, fix=fix)
    if known.location is None:
        why = f"the {method} head of {name} is not here"
        raise InputError(why, field="head", fix=how_to_get(known))
    parallel = method in PARALLEL_METHODS
    since = known.min_vllm or (facts().p_eagle.since if parallel else None)
    return Head(known.location, method, known.k, since, v1=parallel)


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
    from peagle.heads import find  # noqa: PLC0415 (needs torch)
    from peagle.heads.format import read_keys  # noqa: PLC0415
    from peagle.methods.keys import UNKNOWN_DEPTHS  # noqa: PLC0415
    from peagle.vllm.head import is_readable, needs_v1, target_config  # noqa: PLC0415
    from peagle.vllm.serve import in_one_group  # noqa: PLC0415

    with _fetched(head) as folder:
        keys = read_keys(folder)
        if method not in (None, keys.method):
            raise InputError(f"its method is {keys.method}, not {method}", field="head", value=head)
        here = find.Head(head, folder, keys.method, keys.depths or UNKNOWN_DEPTHS)
        if not is_readable(here):
            fix = "`peagle export HEAD FOLDER --to vllm` makes one to upload in its place"
            raise InputError("vLLM cannot read its form", field="head", value=head, fix=fix)
        if keys.correction is not None:
            _warn(f"head {head}: vLLM drafts without its correction")
        parallel = keys.method in PARALLEL_METHODS
        versions = facts().p_eagle
        since = versions.speculators_since if keys.speculators else versions.since
        target = target_config(str(entry.target))
        sizes = keys.parse(target.num_hidden_layers).transformer
        return Head(
            head,
            keys.method,
            here.k,
            since if parallel else None,
            v1=needs_v1(here),
            whole_caches=not in_one_group(sizes, target),
        )


@contextmanager
def _fetched(head: str) -> Iterator[Path]:
    """A folder with the configuration of a head elsewhere."""
    with TemporaryDirectory() as folder:
        try:
            _fetch(head, Path(folder))
        except InputError:
            raise
        except Exception as error:  # of botocore, of the hub's client, and of what these use
            why = f"its config.json cannot be read ({first_line(error)})"
            fix = "name a folder that has one, and log in where it is private"
            raise InputError(why, field="head", value=head, fix=fix) from error
        yield Path(folder)


def _fetch(head: str, folder: Path) -> None:
    if head.startswith(S3):
        import boto3  # noqa: PLC0415

        bucket, _, prefix = head.removeprefix(S3).partition("/")
        key = f"{prefix.strip('/')}/config.json"
        boto3.client("s3").download_file(bucket, key, str(folder / "config.json"))
        return
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    hub_id, _, revision = head.partition("@")
    wanted = ["config.json", "correction/config.json"]
    snapshot_download(hub_id, revision=revision or None, allow_patterns=wanted, local_dir=folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("there is none")


def _warn(text: str) -> None:
    warnings.warn(InputWarning(text), stacklevel=3)

"""From a target, or a name, to a head: the catalog's, or the one that is named; or to the
config.json of a head elsewhere, on the hub or in S3 (a few KB, no weights)."""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from peagle.catalog import CHOICES, HEADLESS, METHODS, CatalogHead, how_to_get, known_entry
from peagle.errors import InputError, InputWarning, first_line
from peagle.heads.format import FORMS, HeadKeys, head_folder, read_keys
from peagle.methods.keys import CORRECTION, UNKNOWN_DEPTHS

S3 = "s3://"
CONFIGS = ["config.json", f"{CORRECTION}/config.json"]


@dataclass(frozen=True, slots=True)
class Head:
    """A head on this machine, before it is loaded."""

    name: str  # folder or hub id, as the user or the catalog has it
    folder: Path
    method: str
    k: int  # num_speculative_tokens


def find_head(
    target: str, name: str | None = None, method: str | None = None, *, field: str = "head"
) -> Head | None:
    """The head `name` (a folder or a hub id), else the catalog's for `target`; None for none.

    Raises InputError about the method, or about the head as `field`. Warns when no method is given
    and the catalog's head is not installed.
    """
    if method is not None and method not in CHOICES:
        fix = f"choose {', '.join(CHOICES)}"
        raise InputError("is no method", field="method", value=method, fix=fix)
    if method in HEADLESS:
        return None
    known = None if name else _catalog_head(target, method, field)
    name = known.location if known else name
    if name is None:
        return None
    folder = head_folder(name, field)
    keys = read_keys(folder)
    if method not in (None, keys.method):
        why = f"its method is {keys.method}, not {method}"
        raise InputError(why, field=field, value=Path(name))
    k = known.k if known else keys.depths or UNKNOWN_DEPTHS
    return Head(name, folder, keys.method, k)


def check_drafts(target: str, head: Head | None, k: int | None) -> None:
    """Raise InputError for a `k` without a head, whose drafts it is about."""
    if head is None and k is not None:
        raise InputError(f"{target} has no head", field="k", value=k, fix="name one with `head`")


def _catalog_head(target: str, method: str | None, field: str) -> CatalogHead | None:
    """The catalog's head, by default of the best method that it has one of, if it is on this
    machine or on the hub."""
    entry = known_entry(target)
    heads = entry.heads if entry else {}
    wanted = method or next((each for each in METHODS if each in heads), None)
    if wanted is None:
        return None
    if wanted not in heads:
        raise InputError(f"no {wanted} head is known for {target}", field=field, fix=FORMS)
    known = heads[wanted]
    if known.location is not None:
        return known
    why = f"the {wanted} head of {target} is not here"
    fix = how_to_get(known)
    if method is not None:
        raise InputError(why, field=field, fix=fix)
    warnings.warn(InputWarning(f"{why}; {fix}"), stacklevel=3)
    return None


def read_remote(location: str) -> HeadKeys:
    """config.json of the head at a hub id or in a folder of S3. Raises InputError where it cannot
    be read."""
    if not location.startswith(S3):
        return read_keys(head_folder(location, wanted=CONFIGS), location)
    with tempfile.TemporaryDirectory() as folder:
        for name in CONFIGS:
            if (content := _object(location, name)) is not None:
                file = Path(folder, name)
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
        return read_keys(Path(folder), location)


def _object(location: str, name: str) -> bytes | None:
    """A file in a folder of S3; None for one that is not there. S3 says "access denied" of it
    to readers who may not list the bucket."""
    try:
        import boto3  # noqa: PLC0415
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    except ImportError as error:
        fix = "pip install 'peagle[deploy]'"
        raise InputError("S3 needs boto3", field="head", value=location, fix=fix) from error
    bucket, _, prefix = location.removeprefix(S3).partition("/")
    key = f"{prefix.rstrip('/')}/{name}".lstrip("/")
    try:
        return bytes(boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
    except (BotoCoreError, ClientError) as error:
        code = getattr(error, "response", {}).get("Error", {}).get("Code")
        if code == "NoSuchKey" or (code == "AccessDenied" and name != CONFIGS[0]):
            return None
        fix = "check the bucket's name, your credentials and the permission s3:GetObject"
        raise InputError(first_line(error), field="head", value=location, fix=fix) from error

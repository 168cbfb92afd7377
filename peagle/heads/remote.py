"""config.json of a head elsewhere, on the hub or in S3: a few KB are read, no weights."""

import tempfile
from pathlib import Path

from peagle.catalog_fields import is_hub_id
from peagle.errors import InputError, first_line
from peagle.heads.correction import CORRECTION
from peagle.heads.folder import head_folder
from peagle.heads.format import HeadKeys, read_keys

S3 = "s3://"
FORMS = "give a hub id (owner/name[@revision]) or s3://bucket/prefix"
CONFIGS = ["config.json", f"{CORRECTION}/config.json"]


def read_remote(location: str) -> HeadKeys:
    """config.json of the head at a hub id or in a folder of S3. Raises InputError where it cannot
    be read."""
    if is_hub_id(location):
        return read_keys(head_folder(location, wanted=CONFIGS), location)
    if not location.startswith(S3):
        raise InputError("neither on the hub nor in S3", field="head", value=location, fix=FORMS)
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
        why, fix = "S3 needs boto3", "pip install 'peagle[deploy]'"
        raise InputError(why, field="head", value=location, fix=fix) from error
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

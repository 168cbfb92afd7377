"""The folder of cached files, and hashes for names in it."""

import hashlib
import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for what peagle makes once and keeps: `$PEAGLE_HOME`, else `~/.cache/peagle`."""
    try:
        return Path(os.environ.get("PEAGLE_HOME") or "~/.cache/peagle").expanduser().absolute()
    except RuntimeError:  # a user without a home, as in containers
        return Path("/.cache/peagle")


def digest(content: bytes) -> str:
    """A short hash, for names of files in the cache and for fingerprints."""
    return hashlib.sha256(content).hexdigest()[:16]

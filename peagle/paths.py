"""The folder of cached files."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for what peagle makes once and keeps: `$PEAGLE_HOME`, else `~/.cache/peagle`."""
    try:
        return Path(os.environ.get("PEAGLE_HOME") or Path.home() / ".cache" / "peagle").absolute()
    except RuntimeError:  # a user without a home, as in containers
        return Path("/.cache/peagle")

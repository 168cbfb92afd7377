"""Where files are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for what peagle makes once and keeps: `$PEAGLE_HOME`, else `~/.cache/peagle`."""
    return Path(os.environ.get("PEAGLE_HOME", Path.home() / ".cache" / "peagle"))

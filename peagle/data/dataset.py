"""JSONL files (plain or .gz) and Parquet files: prompts to answer, and documents to train on."""

import gzip
import json
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import (
    ASKING,
    SYSTEM_ROLES,
    Message,
    Style,
    encode_documents,
    render,
    system_turn,
    to_messages,
    to_style,
)
from peagle.data.conversation import Conversation
from peagle.data.example import Example
from peagle.errors import InputError, InputWarning, first_line
from peagle.model.template import NO_ARGS

MAX_UNUSABLE = 0.05  # share of the records
ANSWER: Message = {"role": "assistant", "content": "answer"}
T = TypeVar("T")


class NoAnswer(InputError):
    """An error of a record without an answer within the maximum length of documents."""


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL file, or the rows of a Parquet file. Raises InputError with
    file and line number."""
    path = Path(path)
    if not path.is_file():
        raise InputError("no such data file", value=path)
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        line_name = Path(f"{path}:{number}")  # as editors and compilers write it
        try:
            record = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            why = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
            raise InputError(f"not JSON ({why})", value=line_name) from error
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 ({error.reason})", value=line_name) from error
        except RecursionError as error:
            raise InputError("nested too deeply", value=line_name) from error
        if not isinstance(record, dict):
            found = type(record).__name__
            raise InputError(f"expected a JSON object, found {found}", value=line_name)
        yield record


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 (an extra)
    except ImportError as error:
        fix = "pip install 'peagle[bench]'"
        raise InputError("pyarrow is not installed", value=path, fix=fix) from error
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(f"cannot be read ({first_line(error)})", value=path) from error


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot be read ({error})", value=path) from error


def read_prompts(path: str | Path, *, strict: bool = False) -> list[list[str]]:
    """Return the user turns of every record: `turns` (a list, or one text), a `question`, or the
    user messages of a conversation."""
    return [
        [m["content"] for ask in conversation.asks for m in ask if m["role"] == "user"]
        for conversation in read_conversations(path, strict=strict)
        if conversation.asks
    ]


def read_conversations(
    path: str | Path,
    system: str | None = None,
    template_args: Mapping[str, Any] = NO_ARGS,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,  # whose template must take them
    strict: bool = False,
) -> list[Conversation]:
    """Read the user's side of every record, turn by turn: `turns`, or a conversation without its
    answers. A record that cannot be used (see `usable`) gives an empty conversation.

    A record keeps its own system turn; others begin with `system`. Tool calls and their results
    stay where they are. `template_args` go over the record's own.
    """

    def parse(record: dict[str, Any]) -> Conversation:
        asks = _asks(_messages(record))
        style = to_style(record)
        if asks[0][0]["role"] not in SYSTEM_ROLES:
            asks[0] = system_turn(system) + asks[0]
        style = Style(style.tools, {**style.args, **template_args})
        if tokenizer is not None:
            answered = [turn for ask in asks for turn in (*ask, ANSWER)]
            render(tokenizer, answered, answer=False, style=style)
        return Conversation(asks, style)

    return [found or Conversation([]) for found in usable(path, parse, strict)]


def usable(path: str | Path, parse: Callable[[dict[str, Any]], T], strict: bool) -> list[T | None]:
    """Parse the records of a file; a record for which `parse` raises InputError gives None. An
    InputWarning counts these by reason.

    Raises InputError for an empty file, for one of which nothing or less than 95 % can be used
    (NoAnswer is no fault), and, `strict`, for the first record that cannot.
    """
    found = list[T | None]()
    reasons: dict[str, list[str]] = defaultdict(list)  # errors that differ in values have one
    wrong = 0
    for number, record in enumerate(read_records(path), start=1):
        try:
            found.append(parse(record))
        except InputError as error:
            text = f"record {number}: {error}"
            faulty = not isinstance(error, NoAnswer)
            if strict and faulty:
                raise InputError(text, value=Path(path)) from error
            found.append(None)
            wrong += faulty
            reasons[error.why].append(text)
    if not found:
        raise InputError("no records: the file is empty", value=Path(path))
    lost = sum(map(len, reasons.values()))
    each = "; ".join(f"{len(texts)} × {texts[0]}" for texts in reasons.values())
    why = f"{lost} of {len(found)} records cannot be used ({each})"
    if wrong > MAX_UNUSABLE * len(found) or lost == len(found):
        raise InputError(why, value=Path(path))
    if lost:
        warnings.warn(f"{path}: {why}: they are left out", InputWarning, stacklevel=3)
    return found


def _messages(record: dict[str, Any]) -> list[Message]:
    """Messages of a record, whose user turns are texts. Raises InputError otherwise."""
    turns = record.get("turns", record.get("question"))
    if turns is None:
        try:
            messages = to_messages(record)
        except InputError as error:
            if "messages" in record or "conversations" in record:
                raise
            raise InputError(f"needs 'turns', or {error.why}") from error
    else:
        texts = turns if isinstance(turns, list) else [turns]
        messages = [{"role": "user", "content": text} for text in texts]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not asked or not all(isinstance(text, str) and text.strip() for text in asked):
        raise InputError("must be a list of non-empty texts", field="turns")
    return messages


def _asks(messages: list[Message]) -> list[list[Message]]:
    """Messages between answers: each list ends with a user's turn or a tool's result."""
    asks: list[list[Message]] = []
    current: list[Message] = []
    for message in messages:
        role = message["role"]
        calls = message.get("tool_calls")
        ready = bool(current) and current[-1]["role"] in ASKING
        if ready and (role == "user" or (role == "assistant" and not calls)):
            asks.append(current)
            current = []
        if role != "assistant" or calls:
            current.append(message)
    if current and current[-1]["role"] in ASKING:
        asks.append(current)
    if not asks:
        raise InputError("ends with a tool call that has no result: nothing to answer")
    return asks


def read_examples(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int, *, strict: bool = False
) -> list[Example]:
    """Read training documents, cut to `max_length` tokens; those without an answer are dropped, and
    records that cannot be used are left out (see `usable`).

    A record holds `prompt_ids` and `answer_ids` (written by `peagle data`: the exact tokens of the
    target), or a conversation, which is tokenized here.
    """
    read = usable(path, lambda record: documents_of(record, tokenizer, max_length), strict)
    return [used for documents in read for _, used in documents or ()]


def documents_of(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> list[tuple[Example, Example]]:
    """Return the documents of a record that can be trained on: whole, and as training cuts them.

    Raises InputError when there is none.
    """
    found = []
    for whole in to_examples(record, tokenizer):
        used = Example(whole.ids[:max_length], whole.supervised[:max_length])
        if any(used.supervised[2:]):  # x[2] is the first token that a drafter could predict
            found.append((whole, used))
    if not found:
        limit = f" within `max_length` {max_length}" if max_length else ""
        raise NoAnswer(f"no answer to train on{limit}")
    return found


def to_examples(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Return the documents of one record, whole. Raises InputError when it has none."""
    if "answer_ids" in record:
        prompt = record.get("prompt_ids")
        answer = record["answer_ids"]
        if not _token_ids(prompt) or not _token_ids(answer):
            raise InputError("`prompt_ids` and `answer_ids` must both be lists of token ids")
        largest = max([*prompt, *answer], default=0)
        if largest >= len(tokenizer):
            why = "has a token id beyond the target's vocabulary; it may be another target's answer"
            raise InputError(why, field="answer_ids", value=largest)
        return [Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
    return encode_documents(tokenizer, to_messages(record), to_style(record))


def _token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)

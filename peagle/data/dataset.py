"""JSONL files (plain or .gz): prompts to answer, and documents to train on."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from peagle.config import InputError
from peagle.data.chat import Example, encode_conversation, to_messages


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a JSONL file, one a line. Raises InputError with file and line number."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"data file {path}: no such file")
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg})") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}:{number}: not UTF-8 ({error.reason})") from error
        if not isinstance(record, dict):
            found = type(record).__name__
            raise InputError(f"{path}:{number}: expected a JSON object, found {found}")
        yield record


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"data file {path}: cannot be read ({error})") from error


def read_prompts(path: str | Path) -> list[list[str]]:
    """User turns of every record: `turns`, or the user messages of a conversation."""
    prompts = []
    for number, record in enumerate(read_records(path), start=1):
        turns = record.get("turns")
        if turns is None:
            try:
                turns = [m["content"] for m in to_messages(record) if m["role"] == "user"]
            except InputError as error:
                raise InputError(f"{path}: record {number}: needs 'turns', or {error}") from error
        texts = turns if isinstance(turns, list) else []
        if not texts or not all(isinstance(turn, str) and turn.strip() for turn in texts):
            raise InputError(f"{path}: record {number}: 'turns' must be a list of non-empty texts")
        prompts.append(texts)
    if not prompts:
        raise InputError(f"{path}: no records")
    return prompts


def read_examples(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Example]:
    """Training documents, cut to `max_length` tokens; those left without an answer are dropped.

    A record holds `prompt_ids` and `answer_ids` (what `peagle data regenerate` writes: the exact
    tokens of the target), or a conversation, which is tokenized here.
    """
    examples = []
    for number, record in enumerate(read_records(path), start=1):
        try:
            example = _example(record, tokenizer)
        except InputError as error:
            raise InputError(f"{path}: record {number}: {error}") from error
        ids, supervised = example.ids[:max_length], example.supervised[:max_length]
        if any(supervised[2:]):
            examples.append(Example(ids, supervised))
    if not examples:
        raise InputError(f"{path}: no answer within --max-length {max_length} tokens to train on")
    return examples


def _example(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example:
    if "answer_ids" in record:
        prompt, answer = record.get("prompt_ids"), record["answer_ids"]
        if not _token_ids(prompt) or not _token_ids(answer):
            raise InputError("'prompt_ids' and 'answer_ids' must both be lists of token ids")
        return Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
    return encode_conversation(tokenizer, to_messages(record))


def _token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)

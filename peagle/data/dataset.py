"""JSONL files (plain or .gz): prompts to answer, and documents to train on."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.config import InputError
from peagle.data.chat import Example, encode_conversation, to_messages


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a JSONL file, one a line. Raises InputError with file and line number."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"data file {path}: no such file")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number}: not JSON ({error.msg})") from error
            if not isinstance(record, dict):
                raise InputError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
            yield record


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
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{path}: record {number}: 'turns' must be a list of non-empty texts")
        prompts.append(list(turns))
    if not prompts:
        raise InputError(f"{path}: no records")
    return prompts


def read_examples(path: str | Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Example]:
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
        prompt, answer = record["prompt_ids"], record["answer_ids"]
        return Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
    return encode_conversation(tokenizer, to_messages(record))

"""Prompts to answer, and documents to train on, of data files."""

import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, TypeGuard, TypeVar

import transformers
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

import peagle
from peagle.data import chat
from peagle.data.documents import Documents, Part, tensors_of
from peagle.data.example import Example
from peagle.data.records import NoAnswer, usable
from peagle.errors import InputError, InputWarning
from peagle.files import writing
from peagle.model.template import NO_ARGS
from peagle.paths import cache_dir

LEFT_OUT = "left_out.json"  # warnings about records that were left out
ANSWER: chat.Message = {"role": "assistant", "content": "answer"}
FILE = 1 << 20  # tokens of a file: read as lists, they fit the memory
T = TypeVar("T")


def read_prompts(
    path: str | Path, *, strict: bool = False, limit: int | None = None
) -> list[list[str]]:
    """Return the user turns of all records, or of the first ones: `turns` (a list, or one text), a
    `question`, or the user messages of a conversation."""
    return [
        [m["content"] for ask in conversation.asks for m in ask if m["role"] == "user"]
        for conversation in read_conversations(path, strict=strict, limit=limit)
        if conversation.asks
    ]


def read_conversations(
    path: str | Path,
    system: str | None = None,
    template_args: Mapping[str, Any] = NO_ARGS,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,  # whose template must take them
    strict: bool = False,
    limit: int | None = None,  # records to read; None: all
) -> list[chat.Conversation]:
    """Read the user's side of records, turn by turn: `turns`, or a conversation without its
    answers. A record that cannot be used (see `usable`) gives an empty conversation.

    A record keeps its own system prompt, a turn or its `system`; others begin with the argument.
    Tool calls and their results stay where they are. `template_args` go over the record's own.
    """

    def parse(record: dict[str, Any]) -> chat.Conversation:
        asks = _asks(_messages(record))
        style = chat.to_style(record)
        asks[0] = chat.with_system(asks[0], record.get("system") or system)
        style = chat.Style(style.tools, {**style.args, **template_args})
        chat.check_text([asks, style])
        if tokenizer is not None:
            answered = [turn for ask in asks for turn in (*ask, ANSWER)]
            chat.render(tokenizer, answered, answer=False, style=style)
        return chat.Conversation(asks, style)

    return [found or chat.Conversation([]) for found in usable(path, parse, strict, limit)]


def mixed(sources: Sequence[tuple[Iterable[T], float | None]], seed: int | None) -> list[T]:
    """Records of several sources, one source after another; with weights, each record is drawn by
    them (1 where a source has none) until the drawn source has no more: the shares hold, and equal
    sources, weights and seeds give equal records."""
    if all(weight is None for _, weight in sources):
        return [record for records, _ in sources for record in records]
    rng = Random(seed or 0)
    left = [iter(records) for records, _ in sources]
    weights = [1.0 if weight is None else weight for _, weight in sources]
    found: list[T] = []
    with suppress(StopIteration):
        while True:
            [source] = rng.choices(left, weights)
            found.append(next(source))
    return found


def _messages(record: dict[str, Any]) -> list[chat.Message]:
    """Messages of a record, whose user turns are texts. Raises InputError otherwise."""
    turns = record.get("question") if record.get("turns") is None else record["turns"]
    if turns is None and not record.keys() & {"messages", "conversations"}:
        raise InputError(f"needs 'turns', or {chat.NEEDED}")
    if turns is None:
        messages = chat.to_messages(record)
    else:
        texts = turns if isinstance(turns, list) else [turns]
        messages = [{"role": "user", "content": text} for text in texts]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not asked or not all(isinstance(text, str) and text.strip() for text in asked):
        raise InputError("must be a list of non-empty texts", field="turns")
    return messages


def _asks(messages: list[chat.Message]) -> list[list[chat.Message]]:
    """Messages between answers: each list ends with a user's turn or a tool's result."""
    asks: list[list[chat.Message]] = []
    current: list[chat.Message] = []
    for message in (*messages, ANSWER):  # the answer that the last turns ask for
        role = message["role"]
        calls = message.get("tool_calls")
        ready = bool(current) and current[-1]["role"] in chat.ASKING
        if ready and (role == "user" or (role == "assistant" and not calls)):
            asks.append(current)
            current = []
        if role != "assistant" or calls:
            current.append(message)
    if not asks:
        raise InputError("ends with a tool call that has no result: nothing to answer")
    return asks


def read_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, *, strict: bool = False
) -> Documents[Part]:
    """Training documents, cut to `max_length` tokens; those without an answer are dropped, and
    records that cannot be used are left out (see `usable`).

    A record holds `prompt_ids` and `answer_ids` (written by `peagle data`: the exact tokens of the
    target), or a conversation. A file is tokenised once: the documents are kept in the cache, and
    found there while file, tokenizer and settings are the same. Other processes wait meanwhile.
    """
    state = path.stat()
    facts = [str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    facts += [2, max_length, strict, peagle.__version__, transformers.__version__]  # 2: of reading
    facts += [repr(tokenizer), str(tokenizer.chat_template)]
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        facts.append(backend.to_str())
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    folder = cache_dir() / "documents" / key
    with writing(folder, "data"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                read = usable(path, lambda each: documents_of(each, tokenizer, max_length), strict)
                _keep(folder, (used for documents in read for _, used in documents or ()))
    for text in json.loads((folder / LEFT_OUT).read_text()):
        warnings.warn(text, InputWarning, stacklevel=2)
    return Documents([Part(file) for file in sorted(folder.glob("*.safetensors"))])


def _keep(folder: Path, examples: Iterator[Example]) -> None:
    """Write documents to a folder, whole or not at all, and the warnings that come with them."""
    tokens = 0

    def file_of(example: Example) -> int:
        nonlocal tokens
        tokens += len(example.ids)
        return tokens // FILE

    made = folder.with_suffix(".making")
    shutil.rmtree(made, ignore_errors=True)  # a killed process leaves it
    made.mkdir()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", InputWarning)
            for number, some in groupby(examples, file_of):
                save_file(tensors_of(list(some)), made / f"{number:05d}.safetensors")
        texts = [str(each.message) for each in caught if each.category is InputWarning]
        (made / LEFT_OUT).write_text(json.dumps(texts))
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


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
    if record.get("answer_ids") is not None:
        prompt = record.get("prompt_ids")
        answer = record["answer_ids"]
        if not _token_ids(prompt) or not _token_ids(answer):
            raise InputError("`prompt_ids` and `answer_ids` must both be lists of token ids")
        largest = max([*prompt, *answer], default=0)
        if largest >= len(tokenizer):
            why = "has a token id beyond the target's vocabulary; it may be another target's answer"
            raise InputError(why, field="answer_ids", value=largest)
        return [Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
    return chat.encode_documents(tokenizer, chat.to_messages(record), chat.to_style(record))


def _token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)

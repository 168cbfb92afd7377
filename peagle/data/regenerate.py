"""The target answers prompts itself: what a drafter must learn to predict."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peagle.config import InputError
from peagle.data.chat import Message, prompt_ids
from peagle.data.dataset import read_prompts
from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams

LINE_START = b'{"record": '


def regenerate(
    llm: LLM,
    prompts_file: Path,
    output: Path,
    params: SamplingParams,
    limit: int | None = None,
    on_record: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Answer every record of a prompt file, turn by turn, and append one line an answer to
    `output`: `messages` for people, `prompt_ids` and `answer_ids` for exact training.

    Records already in `output` are skipped, so a stopped run continues. Returns the number of
    answers written. Raises InputError when `output` holds anything else.
    """
    conversations = read_prompts(prompts_file)
    finished = _answered(output, conversations)
    wanted = range(len(conversations[:limit]))
    todo = [i for i in wanted if i not in finished]
    written, done = 0, len(wanted) - len(todo)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        for group in _groups(todo, llm.max_batch * 4):
            lines = _answer(llm, {i: conversations[i] for i in group}, params)
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            written, done = written + len(lines), done + len(group)
            on_record(done, len(wanted))
    return written


def _answer(
    llm: LLM, conversations: dict[int, list[str]], params: SamplingParams
) -> list[dict[str, Any]]:
    """Lines of several conversations, those of one record together."""
    histories: dict[int, list[Message]] = {i: [] for i in conversations}
    lines: list[dict[str, Any]] = []
    for turn in range(max(map(len, conversations.values()))):
        alive = [i for i, turns in conversations.items() if turn < len(turns)]
        for i in alive:
            histories[i].append({"role": "user", "content": conversations[i][turn]})
        ids = {i: prompt_ids(llm.tokenizer, histories[i]) for i in alive}
        ids = {i: prompt for i, prompt in ids.items() if len(prompt) < llm.target.max_context}
        answers = llm.generate(list(ids.values()), params)
        for (i, prompt), answer in zip(ids.items(), answers, strict=True):
            histories[i].append({"role": "assistant", "content": answer.text})
            said = {"prompt_ids": prompt, "answer_ids": answer.token_ids}
            lines.append({"record": i, "messages": list(histories[i]), **said})
    return sorted(lines, key=lambda line: line["record"])


def _answered(output: Path, conversations: list[list[str]]) -> set[int]:
    """Records a former run finished. A kill cuts off the last line, or the last record's later
    turns: what is left of that record is removed from the file, and it is answered again."""
    if not output.is_file():
        return set()
    lines = output.read_bytes().splitlines(keepends=True)
    cut = bool(lines) and not lines[-1].endswith(b"\n")
    if cut and LINE_START.startswith(lines[-1][: len(LINE_START)]):
        lines.pop()
    records = [_record(output, number, line) for number, line in enumerate(lines, start=1)]
    last = records[-1] if records else 0
    if last < len(conversations) and 0 < records.count(last) < len(conversations[last]):
        keep = records.index(last)
        lines, records = lines[:keep], records[:keep]
    os.truncate(output, sum(map(len, lines)))
    return set(records)


def _record(output: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["record"])
    except (ValueError, KeyError, TypeError) as error:
        why = "not written by `peagle data regenerate`: name another file"
        raise InputError(f"--output {output}:{number}: {why}") from error


def _groups(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

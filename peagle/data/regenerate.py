"""The target answers prompts itself: what a drafter must learn to predict."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peagle.config import InputError
from peagle.data.chat import Message, prompt_ids
from peagle.data.dataset import read_prompts, read_records
from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams


def regenerate(
    llm: LLM,
    prompts_file: Path,
    output: Path,
    params: SamplingParams,
    limit: int | None = None,
    on_record: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Answer every record of a prompt file, turn by turn, and append one line an answer to `output`:
    `messages` for people, `prompt_ids` and `answer_ids` for exact training.

    Records already in `output` are skipped, so a stopped run continues. Returns the answers written.
    """
    conversations = read_prompts(prompts_file)[:limit]
    todo = [i for i in range(len(conversations)) if i not in _answered(output)]
    written, done = 0, len(conversations) - len(todo)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        for group in _groups(todo, llm.max_batch * 4):
            lines = _answer(llm, {i: conversations[i] for i in group}, params)
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            written, done = written + len(lines), done + len(group)
            on_record(done, len(conversations))
    return written


def _answer(llm: LLM, conversations: dict[int, list[str]], params: SamplingParams) -> list[dict[str, Any]]:
    histories: dict[int, list[Message]] = {i: [] for i in conversations}
    lines: list[dict[str, Any]] = []
    for turn in range(max(map(len, conversations.values()))):
        for i, turns in conversations.items():
            if turn < len(turns):
                histories[i].append({"role": "user", "content": turns[turn]})
        ids = {i: prompt_ids(llm.tokenizer, histories[i]) for i, t in conversations.items() if turn < len(t)}
        ids = {i: prompt for i, prompt in ids.items() if len(prompt) < llm.target.max_context}
        for (i, prompt), answer in zip(ids.items(), llm.generate(list(ids.values()), params), strict=True):
            histories[i].append({"role": "assistant", "content": answer.text})
            lines.append(
                {
                    "record": i,
                    "messages": list(histories[i]),
                    "prompt_ids": prompt,
                    "answer_ids": answer.token_ids,
                }
            )
    return lines


def _answered(output: Path) -> set[int]:
    """Records a former run wrote; a line cut off by a kill is removed."""
    if not output.is_file():
        return set()
    raw = output.read_bytes()
    if raw and not raw.endswith(b"\n"):
        with output.open("rb+") as file:
            file.truncate(raw.rfind(b"\n") + 1)
    records = [record.get("record") for record in read_records(output)]
    if None in records:
        raise InputError(f"{output} was not written by `peagle data regenerate`: name another file")
    return set(records)


def _groups(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

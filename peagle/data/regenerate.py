"""Answers of the target to prompts: the text that a drafter must learn to predict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from peagle.data.chat import Conversation, prompt_ids, to_message, to_style
from peagle.data.endpoint import PendingRecord, Servers, Write, ask_servers
from peagle.data.records import append, open_to_append, read_back
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.errors import InputError

GROUPS = 4  # batches of records that are answered together


class Report(NamedTuple):
    """Counts of a run."""

    answers: int  # written
    skipped: int  # turns left out: the first without room in the context, or that failed, and later
    failed: int  # records that an endpoint could not answer; the next run tries again
    problems: list[str]  # errors of endpoints, and of turns that failed


def regenerate(
    source: LLM | Servers,
    conversations: Sequence[Conversation],  # to answer, from `read_conversations`
    output: Path,
    params: SamplingParams,
    on_answers: Callable[[int, int, int], None] = lambda written, total, tokens: None,
) -> Report:
    """Answer every record, turn by turn, and append to `output` one line an answer: `messages` for
    people, `prompt_ids` and `answer_ids` for exact training; from an endpoint one line a record,
    `messages` only.

    A record is written when it has ended; `on_answers` receives the count of answers in the file,
    of all that are wanted, and of the tokens that this run wrote.

    Records already in `output` are skipped, so a stopped run continues; those after the last one
    that is wanted stay. Raises InputError when `output` holds anything else, also answers to other
    prompts, or is being written by another process, or no endpoint is left to ask; RequestFailure
    when turns fail before any is answered.
    """
    problems: list[str] = []
    with open_to_append(output) as file:
        finished = _finished_records(file, conversations)
        todo = [PendingRecord(i, asks) for i, asks in enumerate(conversations) if i not in finished]
        total = sum(len(each.asks) for each in conversations)
        left = sum(len(record.conversation.asks) for record in todo)
        tokens = 0

        def write(records: list[PendingRecord]) -> None:
            nonlocal left, tokens
            lines = [line for record in records for line in record.lines]
            append(file, lines)
            left -= sum(len(record.conversation.asks) for record in records)
            tokens += sum(len(line.get("answer_ids", ())) for line in lines)
            problems.extend(f"record {r.number + 1}: {r.problem}" for r in records if r.problem)
            on_answers(total - left, total, tokens)

        write([])
        if isinstance(source, Servers):
            problems += ask_servers(source, todo, params, write)
        else:
            group = source.max_batch * GROUPS
            for start in range(0, len(todo), group):
                _answer_group(source, todo[start : start + group], params, write)
                if problems and not any(record.answers for record in todo):
                    raise RequestFailure(problems[0])
    answers = sum(record.answers for record in todo if not record.open)
    return Report(answers, sum(r.skipped for r in todo), sum(r.open for r in todo), problems)


def _answer_group(
    llm: LLM, group: list[PendingRecord], params: SamplingParams, write: Write
) -> None:
    """Answer records together, turn by turn, and write each when it and all before it have ended,
    so that the order is that of the prompts; by Ctrl-C or a failure, all that have ended."""

    def write_ended() -> None:
        while group and not group[0].open:
            write([group.pop(0)])

    try:
        while records := [record for record in group if record.open]:
            answer_turn(llm, records, params, write_ended)
    except BaseException:
        write([record for record in group if not record.open])
        raise


def answer_turn(
    llm: LLM,
    records: list[PendingRecord],
    params: SamplingParams,
    on_answer: Callable[[], None] = lambda: None,  # when one has ended
) -> None:
    """Answer the next turn of all records together; a turn that does not fit, or fails, is skipped.
    An answer is shorter than `params` allow where the context or the KV cache has less room."""
    asked: list[PendingRecord] = []
    prompts: list[list[int]] = []
    shortened: list[SamplingParams] = []
    for record in records:
        try:
            ids = prompt_ids(llm.tokenizer, record.asked(), record.conversation.style)
        except InputError as error:
            raise InputError(f"record {record.number + 1}: {error}", field="prompts") from error
        room = llm.context - len(ids)
        if room > 0:
            asked.append(record)
            prompts.append(ids)
            shortened.append(replace(params, max_tokens=min(room, params.max_tokens)))
        else:
            record.skip()
    for number, answer in llm.stream(prompts, shortened).ended() if asked else ():
        if answer.failure is not None:
            asked[number].skip(answer.failure)
            continue
        ids = prompts[number]
        message = to_message(llm.tokenizer, ids, answer.token_ids, answer.text)
        tokens = {"prompt_ids": ids, "answer_ids": list(answer.token_ids)}
        asked[number].add_answer(message, tokens)
        on_answer()
    on_answer()  # those that were skipped


def _finished_records(file: BinaryIO, conversations: Sequence[Conversation]) -> set[int]:
    """Records that a former run finished, in any order. A kill may cut off the last one's later
    turns: its lines are then removed from the file, and it is answered again."""

    def answers(line: dict[str, Any]) -> tuple[int, int]:
        record = line["record"]
        if "draw" in line or type(record) is not int:
            raise ValueError  # `peagle data synth` wrote it
        known = 0 <= record < len(conversations)
        asks, style = conversations[record] if known else Conversation([])
        if asks and (line["messages"][: len(asks[0])], to_style(line)) != (asks[0], style):
            raise InputError("holds answers to other prompts, tools or template arguments")
        return record, int(line.get("answers", 1))

    found = read_back(file, "regenerate", answers)
    records = [record for (record, _), _ in found]
    last = records[-1] if records else 0
    written = sum(count for (record, count), _ in found if record == last)
    if last < len(conversations) and 0 < written < len(conversations[last].asks):
        first = records.index(last)
        file.truncate(found[first][1])
        records = records[:first]
    return set(records)

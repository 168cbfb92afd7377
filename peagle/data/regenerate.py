"""Answers of the target to prompts: the text that a drafter must learn to predict."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message, prompt_ids, to_message
from peagle.data.conversation import Conversation, PendingRecord, Write, drop_oldest
from peagle.data.endpoint import Servers, ask_servers
from peagle.data.jsonl import append, open_to_append, read_back
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.errors import InputError
from peagle.vllm.generate import Answers, open_vllm


class Engine(NamedTuple):
    """The engine of this process: the native one, or vLLM's."""

    tokenizer: PreTrainedTokenizerBase
    max_context: int
    group: int  # records answered together
    generate: Callable[[list[list[int]], SamplingParams], Answers]


class Report(NamedTuple):
    """Counts of a run."""

    answers: int  # written
    truncated: int  # answers whose conversation lost its oldest turns to fit the context
    skipped: int  # turns left out: one that is too long even alone, and all after it
    failed: int  # records that an endpoint could not answer; the next run tries again
    problems: list[str]  # errors of endpoints


def native(llm: LLM) -> Engine:
    """Answer with the native engine."""

    def generate(prompts: list[list[int]], params: SamplingParams) -> Answers:
        return llm.stream(prompts, params).ended()

    return Engine(llm.tokenizer, llm.target.max_context, llm.max_batch * 4, generate)


def through_vllm(target: str, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Answer with vLLM in this process. Raises InputError where vLLM cannot be imported."""
    engine = open_vllm(target)
    return Engine(tokenizer, engine.max_context, 1024, engine.generate)


def regenerate(
    source: LLM | Engine | Servers,
    conversations: Sequence[Conversation],  # all of a prompt file, from `read_conversations`
    output: Path,
    params: SamplingParams,
    limit: int | None = None,  # records to answer
    on_answers: Callable[[int, int, int], None] = lambda written, total, tokens: None,
) -> Report:
    """Answer every record, turn by turn, and append to `output` one line an answer: `messages` for
    people, `prompt_ids` and `answer_ids` for exact training; from an endpoint one line a record,
    `messages` only.

    A record is written when it has ended; `on_answers` receives the count of answers in the file,
    of all that are wanted, and of the tokens that this run wrote.

    Records already in `output` are skipped, so a stopped run continues. A conversation that leaves
    too little room for an answer loses its oldest turns. Raises InputError when `output` holds
    anything else or is being written by another process, or no endpoint is left to ask.
    """
    problems: list[str] = []
    wanted = conversations[:limit]
    with open_to_append(output) as file:
        finished = _finished_records(file, conversations)
        todo = [PendingRecord(i, asks) for i, asks in enumerate(wanted) if i not in finished]
        total = sum(len(each.asks) for each in wanted)
        left = sum(len(record.conversation.asks) for record in todo)
        tokens = 0

        def write(records: list[PendingRecord]) -> None:
            nonlocal left, tokens
            lines = [line for record in records for line in record.lines]
            append(file, lines)
            left -= sum(len(record.conversation.asks) for record in records)
            tokens += sum(len(line.get("answer_ids", ())) for line in lines)
            on_answers(total - left, total, tokens)

        write([])
        if isinstance(source, Servers):
            problems = ask_servers(source, todo, params, write)
        else:
            engine = native(source) if isinstance(source, LLM) else source
            for start in range(0, len(todo), engine.group):
                _answer_group(engine, todo[start : start + engine.group], params, write)
    return Report(
        sum(record.answers for record in todo if not record.open),
        sum(record.truncated for record in todo),
        sum(record.skipped for record in todo),
        sum(record.open for record in todo),
        problems,
    )


def _answer_group(
    engine: Engine, group: list[PendingRecord], params: SamplingParams, write: Write
) -> None:
    """Answer records together, turn by turn, and write each when it and all before it have ended,
    so that the order is that of the prompts; by Ctrl-C or a failure, all that have ended."""

    def write_ended() -> None:
        while group and not group[0].open:
            write([group.pop(0)])

    try:
        while records := [record for record in group if record.open]:
            answer_turn(engine, records, params, write_ended)
    except BaseException:
        write([record for record in group if not record.open])
        raise


def answer_turn(
    engine: Engine,
    records: list[PendingRecord],
    params: SamplingParams,
    on_answer: Callable[[], None] = lambda: None,  # when one has ended
) -> None:
    """Answer the next turn of all records together; a turn that does not fit is skipped."""
    asked: list[tuple[PendingRecord, list[Message]]] = []
    prompts: list[list[int]] = []
    for record in records:
        messages, ids = _fit(engine, record, params)
        if len(ids) < engine.max_context:
            asked.append((record, messages))
            prompts.append(ids)
        else:
            record.skip()
    for number, answer in engine.generate(prompts, params) if asked else ():
        record, messages = asked[number]
        ids = prompts[number]
        message = to_message(engine.tokenizer, ids, answer.token_ids, answer.text)
        tokens = {"prompt_ids": ids, "answer_ids": list(answer.token_ids)}
        record.add_answer(messages, message, tokens)
        on_answer()
    on_answer()  # those that were skipped


def _fit(
    engine: Engine, record: PendingRecord, params: SamplingParams
) -> tuple[list[Message], list[int]]:
    """The conversation and its ids, without the oldest turns while they leave less room than the
    answer may need, or a quarter of the context."""
    room = min(params.max_tokens, engine.max_context // 4)
    messages = record.asked()
    while True:
        try:
            ids = prompt_ids(engine.tokenizer, messages, record.conversation.style)
        except InputError as error:
            raise InputError(f"record {record.number + 1}: {error}", field="prompts") from error
        shorter = drop_oldest(messages)
        if len(ids) + room <= engine.max_context or not shorter:
            return messages, ids
        messages = shorter


def _finished_records(file: BinaryIO, conversations: Sequence[Conversation]) -> set[int]:
    """Records that a former run finished, in any order. A kill may cut off the last one's later
    turns: its lines are then removed from the file, and it is answered again."""

    def answers(line: dict[str, Any]) -> tuple[int, int]:
        if "draw" in line or type(line["record"]) is not int:
            raise ValueError  # `peagle data synth` wrote it
        return line["record"], int(line.get("answers", 1))

    found = read_back(file, "regenerate", answers)
    records = [record for (record, _), _ in found]
    last = records[-1] if records else 0
    written = sum(count for (record, count), _ in found if record == last)
    if last < len(conversations) and 0 < written < len(conversations[last].asks):
        first = records.index(last)
        file.truncate(found[first][1])
        records = records[:first]
    return set(records)

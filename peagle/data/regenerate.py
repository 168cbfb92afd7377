"""The target answers prompts itself: what a drafter must learn to predict."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message, prompt_ids
from peagle.data.conversation import Talk, drop_oldest
from peagle.data.dataset import Conversation
from peagle.data.endpoint import Servers, ask_servers
from peagle.data.jsonl import append, open_to_append, read_back
from peagle.data.response_parser import to_message
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Completion
from peagle.errors import InputError
from peagle.vllm.generate import open_vllm


class Engine(NamedTuple):
    """What answers in this process: our engine, or vLLM's."""

    tokenizer: PreTrainedTokenizerBase
    max_context: int
    group: int  # records answered together and written together
    generate: Callable[[list[list[int]], SamplingParams], Sequence[Completion]]


class Report(NamedTuple):
    """What a run did."""

    answers: int  # written
    truncated: int  # of them, those whose conversation lost its oldest turns to fit the context
    skipped: int  # turns left out: too long for the context even alone, and what came after
    failed: int  # records an endpoint could not answer; the next run asks again
    problems: list[str]  # of endpoints, in words


def native(llm: LLM) -> Engine:
    """Our own engine as what answers."""
    return Engine(llm.tokenizer, llm.target.max_context, llm.max_batch * 4, llm.generate)


def through_vllm(target: str, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """vLLM in this process as what answers. Raises InputError where vLLM cannot be imported."""
    engine = open_vllm(target)
    return Engine(tokenizer, engine.max_context, 1024, engine.generate)


def regenerate(
    source: LLM | Engine | Servers,
    conversations: Sequence[Conversation],  # all of a prompt file, from `read_conversations`
    output: Path,
    params: SamplingParams,
    limit: int | None = None,  # of records
    on_record: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Answer every record, turn by turn, and append to `output` one line an answer: `messages` for
    people, `prompt_ids` and `answer_ids` for exact training; from an endpoint one line a record,
    `messages` only.

    Records already in `output` are skipped, so a stopped run continues. A conversation that leaves
    too little room for an answer loses its oldest turns. Raises InputError when `output` holds
    anything else or is being written by another process, or no endpoint is left to ask.
    """
    problems: list[str] = []
    with open_to_append(output) as file:
        finished = _answered(file, conversations)
        wanted = conversations[:limit]
        todo = [Talk(i, asks) for i, asks in enumerate(wanted) if i not in finished]
        if isinstance(source, Servers):
            answered = ask_servers(source, todo, params, problems)
        else:
            engine = native(source) if isinstance(source, LLM) else source
            answered = _answer(engine, todo, params)
        done = len(wanted) - len(todo)
        on_record(done, len(wanted))
        for talks in answered:
            append(file, [line for talk in talks for line in talk.lines])
            done += len(talks)
            on_record(done, len(wanted))
    return Report(
        sum(talk.answers for talk in todo if not talk.open),
        sum(talk.truncated for talk in todo),
        sum(talk.skipped for talk in todo),
        sum(talk.open for talk in todo),
        problems,
    )


def _answer(engine: Engine, todo: list[Talk], params: SamplingParams) -> Iterator[list[Talk]]:
    """Groups of records, each turn of all of them answered together."""
    for start in range(0, len(todo), engine.group):
        group = todo[start : start + engine.group]
        while turn := [talk for talk in group if talk.open]:
            asked = [(talk, *_fit(engine, talk, params)) for talk in turn]
            for talk, _, ids in asked:
                if len(ids) >= engine.max_context:
                    talk.skip()
            asked = [each for each in asked if each[0].open]
            answers = engine.generate([ids for _, _, ids in asked], params) if asked else []
            for (talk, messages, ids), answer in zip(asked, answers, strict=True):
                said = to_message(engine.tokenizer, ids, answer.token_ids, answer.text)
                tokens = {"prompt_ids": ids, "answer_ids": list(answer.token_ids)}
                talk.say(messages, said, tokens)
        yield group


def _fit(engine: Engine, talk: Talk, params: SamplingParams) -> tuple[list[Message], list[int]]:
    """The conversation and its ids, without the oldest turns while they leave less room than the
    answer may need, or a quarter of the context."""
    room = min(params.max_tokens, engine.max_context // 4)
    messages = talk.asked()
    while True:
        try:
            ids = prompt_ids(engine.tokenizer, messages, talk.conversation.style)
        except InputError as error:
            raise InputError(f"record {talk.record + 1} of the prompts: {error}") from error
        shorter = drop_oldest(messages) if len(ids) + room > engine.max_context else None
        if shorter is None:
            return messages, ids
        messages = shorter


def _answered(file: BinaryIO, conversations: Sequence[Conversation]) -> set[int]:
    """Records a former run finished, in any order. A kill may cut off the last one's later turns:
    what is left of that record is removed from the file, and it is answered again."""

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

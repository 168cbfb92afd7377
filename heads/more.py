"""More answers, to prompts of the kinds of prompts.py: those that were made on a GPU.

    python heads/more.py train_prompts.jsonl.gz DATA answers.jsonl.gz more_answers.jsonl.gz

DATA is what data.sh has made of these files by then. Texts and functions come from all answers;
nothing that prompts.py keeps to measure on is used. Of all that could be asked DATA/more.jsonl gets
what is answered in heads/answers.jsonl.gz.
"""

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from answers import PARAMS, TARGET, Missing, Packed, lines_of
from prompts import COMPLETE, MAKERS, SEED, SHORT_ANSWERS, Pool, collect, from_template, run, split

from peagle.data.chat import Conversation, Message
from peagle.data.dataset import read_prompts
from peagle.data.endpoint import PendingRecord
from peagle.data.records import append, read_records
from peagle.data.regenerate import answer_turn
from peagle.files import replacing

PACKED = Path(__file__).with_name("answers.jsonl.gz")
MADE = ("greedy.jsonl", "sampled.jsonl", "synth.jsonl")
SEED_OF_MORE = 36
SHORT = 5000  # prompts whose answer is a word or a letter
OF_TEXTS = {"translation": 3000, "summary": 3000, "question": 3000, "json": 2500}
OF_PROMPTS = {"list": 2500, "other languages": 2500, "dialogue": 3000}


class Material(NamedTuple):
    """Texts that prompts are made from, but for those that prompts.py keeps to measure on."""

    pool: Pool
    short: list[str]  # prompts whose answer is a word or a letter
    plain: list[str]  # all other prompts, those that were answered, too


def material(prompts: Path, data: Path, answers: list[Path]) -> Material:
    """From all prompts and all answers."""
    kept, _ = split(collect(TARGET, prompts, answers), random.Random(SEED))
    pool = collect(TARGET, prompts, answers + [data / name for name in MADE])
    used = [
        [value for value in values if value not in held]
        for values, held in zip(pool, map(set, kept), strict=True)
    ]
    plain, short = list[str](), list[str]()
    sources = [str(record.get("source", "")) for record in read_records(prompts)]
    for source, turns in zip(sources, read_prompts(prompts), strict=True):
        if (text := turns[0].strip()) not in kept.prompts:
            (short if source.startswith(SHORT_ANSWERS) else plain).append(text)
    return Material(Pool(*used), short, plain)


def could_be_asked(made_from: Material) -> list[list[str]]:
    """User turns of every kind."""
    (unanswered, texts, functions), short, plain = made_from
    rng = random.Random(SEED_OF_MORE)
    asked = [[text] for text in (*unanswered, *rng.sample(short, min(SHORT, len(short))))]
    for values, counts in ((texts, OF_TEXTS), (plain, OF_PROMPTS)):
        for kind, count in counts.items():
            maker = MAKERS[kind][1]
            drawn = rng.sample(values, min(count, len(values)))
            asked += [maker(rng, text) for text in drawn]
    for maker in map(from_template, COMPLETE):
        asked += [maker(rng, text) for text in functions]
    return asked


def answered(engine: Packed, number: int, turns: list[str]) -> PendingRecord | None:
    """A record with all its answers; None where one of them is not there."""
    record = PendingRecord(number, Conversation([[user_turn(text)] for text in turns]))
    with suppress(Missing):
        while record.open:
            answer_turn(engine, [record], PARAMS)
        return record
    return None


def user_turn(text: str) -> Message:
    return {"role": "user", "content": text}


def main() -> None:
    prompts, data, *answers = map(Path, sys.argv[1:])
    output = data / "more.jsonl"
    engine = Packed(lines_of(PACKED, output))
    # Whole or not at all: data.sh does not make a file again that is there.
    with replacing(output) as made, made.open("wb") as file:
        for number, turns in enumerate(could_be_asked(material(prompts, data, answers))):
            if record := answered(engine, number, turns):
                append(file, record.lines)


if __name__ == "__main__":
    run(main)

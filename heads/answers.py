"""Keep answers without their prompts, and put both together again.

    python heads/answers.py pack greedy.jsonl sampled.jsonl synth.jsonl heads/answers.jsonl.gz
    python heads/answers.py unpack heads/answers.jsonl.gz prompts/greedy.jsonl greedy.jsonl
    python heads/answers.py unpack heads/answers.jsonl.gz synth.jsonl

A packed line is an answer's tokens, a hash of the tokens that it answers, and its file's name, by
which it is unpacked; a prompt that the target wrote itself is kept, too. Unpacking answers a file
of prompts as `peagle data regenerate` does, with packed answers in the place of the target: it
writes what the target would write, up to the first prompt without an answer. Without a file of
prompts it writes what `peagle data synth` wrote.
"""

import argparse
import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from peagle.data.chat import Conversation
from peagle.data.dataset import read_conversations
from peagle.data.endpoint import PendingRecord
from peagle.data.records import append, read_records
from peagle.data.regenerate import answer_turn, regenerate
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.run import Completion
from peagle.files import replacing
from peagle.model.loader import load_target

TARGET = "smollm2-135m"
PARAMS = SamplingParams(max_tokens=384)


class Missing(Exception):
    """No answer to a prompt."""


def key(prompt_ids: list[int]) -> str:
    """A hash of a prompt."""
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:20]


def pack(files: Sequence[Path], output: Path) -> None:
    """All answers of some data files."""
    packed = [packed_line(line, file) for file in files for line in read_records(file)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in packed)
    output.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{output}: {len(packed)} answers")


def packed_line(line: dict[str, Any], file: Path) -> dict[str, Any]:
    """A line of a data file without its prompt."""
    asked = key(line["prompt_ids"])
    kept = {"file": file.name, "prompt": asked, "answer_ids": line["answer_ids"]}
    if "draw" in line:  # the target wrote the prompt
        kept |= {name: line[name] for name in ("kind", "draw")}
        kept["user"] = line["messages"][-2]["content"]
    return kept


def lines_of(packed: Path, file: Path) -> list[dict[str, Any]]:
    """Packed lines of a data file, by its name."""
    return [line for line in read_records(packed) if line["file"] == file.name]


def next_of(answers: list[list[int]]) -> list[int]:
    """The first answer; the last one stays."""
    return answers.pop(0) if len(answers) > 1 else answers[0]


class Packed:
    """Answers from packed lines, in the place of an LLM."""

    max_batch = 4

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.target = load_target(TARGET)
        self.tokenizer = self.target.tokenizer
        self.context = self.target.max_context
        self.answers: dict[str, list[list[int]]] = defaultdict(list)  # a prompt may be asked again
        for line in lines:
            self.answers[line["prompt"]].append(line["answer_ids"])

    def stream(self, asked: list[list[int]], _: list[SamplingParams]) -> "Found":
        """Raises Missing where the lines have no answer."""
        keys = [key(ids) for ids in asked]
        if any(each not in self.answers for each in keys):
            raise Missing
        found = [next_of(self.answers[each]) for each in keys]
        texts = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        # The engine that made them left out a character whose last bytes were not emitted.
        return Found(
            Completion(text.removesuffix("\N{REPLACEMENT CHARACTER}"), ids, "stop", Stats(), [])
            for text, ids in zip(texts, found, strict=True)
        )


class Found:
    """Answers, all of which have ended."""

    def __init__(self, answers: Iterable[Completion]) -> None:
        self.answers = answers

    def ended(self) -> Iterable[tuple[int, Completion]]:
        return enumerate(self.answers)


def unpack(packed: Path, prompts: Path, output: Path) -> None:
    """A data file of the prompts, with their answers. A run that is stopped leaves none: data.sh
    does not unpack again what is there."""
    engine = Packed(lines_of(packed, output))
    with replacing(output) as made, suppress(Missing):
        made.unlink(missing_ok=True)  # a killed process leaves it
        regenerate(engine, read_conversations(prompts), made, PARAMS)


def unpack_synth(packed: Path, output: Path) -> None:
    """A data file of the prompts that the target wrote itself, with their answers, or none."""
    lines = lines_of(packed, output)
    engine = Packed(lines)
    asked = [Conversation([[{"role": "user", "content": line["user"]}]]) for line in lines]
    records = [PendingRecord(number, conversation) for number, conversation in enumerate(asked)]
    answer_turn(engine, records, PARAMS)
    answered = [
        record.lines[0] | {"kind": line["kind"], "draw": line["draw"]}
        for record, line in zip(records, lines, strict=True)
    ]
    with replacing(output) as made, made.open("wb") as file:
        append(file, answered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("pack", "unpack"))
    parser.add_argument("files", type=Path, nargs="+", help="as above; the output is the last")
    args = parser.parse_args()
    *files, output = args.files
    if args.command == "pack":
        pack(files, output)
    elif len(files) == 1:
        unpack_synth(files[0], output)
    else:
        packed, prompts = files
        unpack(packed, prompts, output)


if __name__ == "__main__":
    main()

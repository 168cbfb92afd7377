"""Keep answers without their prompts, and put both together again.

    python heads/answers.py pack greedy.jsonl sampled.jsonl heads/answers.jsonl.gz
    python heads/answers.py unpack heads/answers.jsonl.gz prompts/greedy.jsonl greedy.jsonl

A packed line is an answer's tokens and a hash of the tokens that it answers. Unpacking answers a
file of prompts as `peagle data regenerate` does, with packed answers in the place of the target: it
writes what the target would write, up to the first prompt without an answer.
"""

import argparse
import gzip
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from peagle.data.dataset import read_conversations, read_records
from peagle.data.regenerate import Engine, regenerate
from peagle.engine.params import SamplingParams
from peagle.engine.request import Completion, Stats
from peagle.model.loader import load_target

TARGET = "smollm2-135m"
LONGEST = 384  # tokens of an answer
GROUP = 16  # records written together


class Missing(Exception):
    """No answer to a prompt."""


def key(prompt_ids: list[int]) -> str:
    """Of what was asked."""
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:20]


def pack(files: Sequence[Path], output: Path) -> None:
    """All answers of some data files."""
    lines = [
        json.dumps({"prompt": key(line["prompt_ids"]), "answer_ids": line["answer_ids"]}) + "\n"
        for file in files
        for line in read_records(file)
    ]
    output.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    print(f"{output}: {len(lines)} answers")


def unpack(packed: Path, prompts: Path, output: Path) -> None:
    """A data file of the prompts, with their answers."""
    target = load_target(TARGET)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    answers = {line["prompt"]: line["answer_ids"] for line in read_records(packed)}

    def generate(asked: list[list[int]], params: SamplingParams) -> Sequence[Completion]:
        if any(key(ids) not in answers for ids in asked):
            raise Missing
        found = [answers[key(ids)] for ids in asked]
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        # The engine leaves out a character whose last bytes were not said.
        return [
            Completion(text.removesuffix("\N{REPLACEMENT CHARACTER}"), ids, "stop", Stats(), [])
            for text, ids in zip(texts, found, strict=True)
        ]

    engine = Engine(tokenizer, target.max_context, GROUP, generate)
    params = SamplingParams(max_tokens=LONGEST)
    with suppress(Missing):
        regenerate(engine, read_conversations(prompts), output, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("pack", "unpack"))
    parser.add_argument("files", type=Path, nargs="+", help="as above; the output is the last")
    args = parser.parse_args()
    *files, output = args.files
    if args.command == "pack":
        pack(files, output)
    else:
        packed, prompts = files
        unpack(packed, prompts, output)


if __name__ == "__main__":
    main()

"""Prompts by the ten thousand, for generate.py.

    python heads/ask.py train_prompts.jsonl.gz DATA answers.jsonl.gz more_answers.jsonl.gz OUT \
        --not-in humaneval.jsonl mt_bench.jsonl

DATA is what data.sh has made of these files. Writes OUT/greedy.jsonl and OUT/sampled.jsonl, to be
answered so, and DATA/asked.jsonl: those that heads/asked.xz holds the answers of. A prompt that has
50 characters in a row of a file of --not-in, which heads are measured on, is left out.

asked.xz is packed: of each answer the hash of its prompt (8 bytes), the number of its tokens, and
these (2 bytes each).
"""

import argparse
import hashlib
import json
import lzma
import random
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from more import TARGET, could_be_asked, material
from prompts import LANGUAGES, Maker, first_turn, from_template, run
from transformers import PreTrainedTokenizerBase

from peagle.data.chat import PLAIN_STYLE, prompt_ids
from peagle.data.dataset import read_prompts
from peagle.data.records import read_records
from peagle.model.loader import load_tokenizer

ANSWERS = Path(__file__).with_name("asked.xz")
SEED = 37
SHORT = 6000  # prompts whose answer is a word or a letter
WINDOW = 50  # characters
LONGEST = 700  # tokens of a prompt
OF_FUNCTIONS: tuple[Maker, ...] = (
    from_template("Write three unit tests for this function:\n```python\n{0}\n```"),
    from_template("```python\n{0}\n```\nExplain how you would write this function, then write it."),
    from_template("Translate this function to JavaScript and finish it.\n\n```python\n{0}\n```"),
    from_template("Implement this function without any library:\n```python\n{0}\n```"),
    from_template("Write this function with type hints.\n\n```python\n{0}\n```"),
    from_template("{0}\n\nGive me two different ways to write the function above, in Python."),
)
OF_TEXTS: tuple[Maker, ...] = (
    from_template(
        "Rewrite this text so that a child can understand it.\n\n{0}",
        "Say the same more formally:\n\n{0}",
        "Turn this into an e-mail to a colleague:\n\n{0}",
    ),
    from_template(
        "Correct all mistakes in this text and return the whole text.\n\n{0}",
        "Repeat this text word by word, but put the first sentence at the end.\n\n{0}",
        "Replace the most frequent noun of this text by another one:\n\n{0}",
    ),
    from_template(
        "{0}\n\nContinue this text.",
        "{0}\n\nWrite a dialogue of two people about this text.",
        "Ask five questions about this text, and answer each of them.\n\n{0}",
    ),
    lambda rng, text: [f"Translate into {rng.choice(LANGUAGES)}, line by line:\n\n{text[:500]}"],
)


def windows(text: str) -> set[str]:
    """Every run of 50 characters: two texts that share such a run have one of these in common."""
    return {text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)}


def asked(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], foreign: set[str]
) -> Iterator[list[int]]:
    """Tokens of prompts, in random order."""
    for text in random.Random(SEED).sample(texts, len(texts)):
        ids = prompt_ids(tokenizer, [{"role": "user", "content": text}], PLAIN_STYLE)
        if len(ids) <= LONGEST and foreign.isdisjoint(windows(text)):
            yield ids


def unpack(packed: bytes) -> dict[bytes, list[int]]:
    """Answers by the hashes of their prompts."""
    answers = {}
    at = 0
    while at < len(packed):
        size = 2 * int.from_bytes(packed[at + 8 : at + 10], "little")
        answers[packed[at : at + 8]] = array("H", packed[at + 10 : at + 10 + size]).tolist()
        at += 10 + size
    return answers


def hash_of(prompt: list[int]) -> bytes:
    return hashlib.sha256(array("H", prompt).tobytes()).digest()[:8]


def write(file: Path, lines: Iterable[dict[str, list[int]]]) -> None:
    """A JSONL file."""
    texts = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    file.write_text("".join(texts))
    print(f"{file}: {len(texts)} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--not-in", type=Path, nargs="+", default=[])
    args = parser.parse_args()

    measured_on = [turns for file in args.not_in for turns in read_prompts(file)]
    foreign = {part for turns in measured_on for part in windows(" ".join(turns))}
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(TARGET)
    rng = random.Random(SEED)
    lines = read_records(args.data / "more.jsonl")
    answered = {first_turn(tokenizer.decode(line["prompt_ids"])) for line in lines}
    made_from = material(args.prompts, args.data, args.answers)
    first_turns = [turns[0] for turns in could_be_asked(made_from)]
    greedy = [text for text in first_turns if text.strip() not in answered]
    (_, material_texts, functions), short, plain = made_from
    for makers, values in ((OF_FUNCTIONS, functions), (OF_TEXTS, material_texts)):
        greedy += [maker(rng, value)[0] for maker in makers for value in values]
    sampled = plain + rng.sample(short, min(SHORT, len(short)))
    answers = unpack(lzma.decompress(ANSWERS.read_bytes()))
    known = []
    for name, texts in (("greedy", greedy), ("sampled", sampled)):
        open_ones = []
        for prompt in asked(tokenizer, texts, foreign):
            answer = answers.pop(hash_of(prompt), None)
            line = {"prompt_ids": prompt}
            if answer is None:
                open_ones.append(line)
            else:
                known.append(line | {"answer_ids": answer})
        write(args.out / f"{name}.jsonl", open_ones)
    write(args.data / "asked.jsonl", known)


if __name__ == "__main__":
    run(main)

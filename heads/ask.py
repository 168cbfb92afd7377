"""Prompts by the ten thousand, for generate.py, and those that follow from its answers.

    python heads/ask.py first train_prompts.jsonl.gz DATA answers.jsonl.gz more_answers.jsonl.gz OUT
    python heads/ask.py then OUT humaneval.jsonl mt_bench.jsonl

DATA is what data.sh has made of these files. `first` writes OUT/greedy.jsonl and OUT/sampled.jsonl,
to be answered so, and OUT/starts.jsonl, beginnings of user turns that the target goes on with.
`then` reads what generate.py made of greedy.jsonl (OUT/greedy.answers.jsonl) and of starts.jsonl
(OUT/starts.answers.jsonl); it writes OUT/written.jsonl, the user turns that the target wrote, and
OUT/further.jsonl, dialogues that go on. A user turn that has 50 characters in a row of a file to
measure on is left out.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from more import TARGET, could_be_asked, material
from prompts import FOLLOW_UPS, LANGUAGES, Maker, first_turn, from_template
from transformers import PreTrainedTokenizerBase

from peagle.data.chat import PLAIN_STYLE, prompt_ids
from peagle.data.dataset import read_prompts
from peagle.data.records import read_records
from peagle.data.synth import MIN_TOKENS, all_draws, refusal, user_turn
from peagle.model.loader import load_tokenizer

SEED = 37
SHORT = 6000  # prompts whose answer is a word or a letter
STARTS = 30_000
FURTHER = 16_000
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


def write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A JSONL file."""
    count = 0
    with file.open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
            count += 1
    print(f"{file}: {count} lines")


def as_prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[dict[str, Any]]:
    """Lines of generate.py, in random order."""
    for text in random.Random(SEED).sample(texts, len(texts)):
        ids = prompt_ids(tokenizer, [{"role": "user", "content": text}], PLAIN_STYLE)
        if len(ids) <= LONGEST:
            yield {"prompt_ids": ids}


def first(prompts: Path, data: Path, *rest: Path) -> None:
    *answers, out = rest
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(TARGET)
    rng = random.Random(SEED)
    lines = read_records(data / "more.jsonl")
    answered = {first_turn(tokenizer.decode(line["prompt_ids"])) for line in lines}
    made_from = material(prompts, data, list(answers))
    asked = [turns[0] for turns in could_be_asked(made_from)]
    greedy = [text for text in asked if text.strip() not in answered]
    (_, texts, functions), short, plain = made_from
    for makers, values in ((OF_FUNCTIONS, functions), (OF_TEXTS, texts)):
        greedy += [maker(rng, value)[0] for maker in makers for value in values]
    write(out / "greedy.jsonl", as_prompts(tokenizer, greedy))
    write(out / "sampled.jsonl", as_prompts(tokenizer, plain + rng.sample(short, SHORT)))
    turn = user_turn(tokenizer, [], PLAIN_STYLE, {end_of(tokenizer)})
    draws = islice(all_draws(SEED, 0), STARTS)
    texts = [turn.start + draw.starter for draw in draws]
    starts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    write(out / "starts.jsonl", ({"prompt_ids": ids} for ids in starts))


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a turn."""
    return cast(int, tokenizer.convert_tokens_to_ids("<|im_end|>"))


def last_turn(text: str) -> str:
    """The last user turn of a prompt, where nothing follows it."""
    return text.rsplit("<|im_start|>user\n", 1)[-1].removesuffix("<|im_end|>").strip()


def then(out: Path, *measured_on: Path) -> None:
    records = [turns for file in measured_on for turns in read_prompts(file)]
    foreign = {part for turns in records for part in windows(" ".join(turns))}
    tokenizer = load_tokenizer(TARGET)
    end = end_of(tokenizer)
    drafts = [
        line["prompt_ids"] + line["answer_ids"]
        for line in read_records(out / "starts.answers.jsonl")
        if len(line["answer_ids"]) > MIN_TOKENS and line["answer_ids"][-1] == end
    ]
    texts = map(last_turn, tokenizer.batch_decode(drafts))
    turns = dict.fromkeys(
        text for text in texts if "<|" not in text and refusal(text, set()) is None
    )
    written = [text for text in turns if foreign.isdisjoint(windows(text))]
    print(f"{len(turns) - len(written)} user turns left out")
    write(out / "written.jsonl", as_prompts(tokenizer, written))
    rng = random.Random(SEED)
    openings = [
        f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in FOLLOW_UPS
    ]
    follow_ups = tokenizer(openings, add_special_tokens=False)["input_ids"]
    ended = (
        line["prompt_ids"] + line["answer_ids"]
        for line in read_records(out / "greedy.answers.jsonl")
        if line["answer_ids"][-1] == end
    )
    short = [ids for ids in ended if len(ids) < LONGEST]
    chosen = rng.sample(short, min(FURTHER, len(short)))
    write(out / "further.jsonl", ({"prompt_ids": ids + rng.choice(follow_ups)} for ids in chosen))


def windows(text: str) -> set[str]:
    """Every run of 50 characters: two texts that share such a run have one of these in common."""
    return {text[at : at + WINDOW] for at in range(len(text) - WINDOW + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("first", "then"))
    parser.add_argument("paths", type=Path, nargs="+", help="as above")
    args = parser.parse_args()
    {"first": first, "then": then}[args.command](*args.paths)


if __name__ == "__main__":
    main()

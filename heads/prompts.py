"""Prompts of many kinds, for a head that is to be fast on all of them.

    python heads/prompts.py smollm2-135m PROMPTS ANSWERS… --output runs/prompts

Plain prompts come from the first file, those that nothing was answered to yet; texts to translate,
to summarise and to ask about are the target's own answers in the other files. Writes greedy.jsonl
and half as many records in sampled.jsonl, to be answered so, and held_out.jsonl, to measure on: its
prompts and texts are in neither of the others. Every line has `kind` and `turns`.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from peagle.data.dataset import read_prompts
from peagle.data.records import read_records
from peagle.errors import InputError
from peagle.model.loader import load_tokenizer

SEED = 0
HELD_OUT = 24  # prompts of each kind to measure on
SHORT_ANSWERS = ("flan", "svamp", "p3")  # sources whose answers are a word or a letter
SHARES = {
    "plain": 38,
    "dialogue": 10,
    "translation": 9,
    "other languages": 6,
    "summary": 9,
    "question": 9,
    "list": 6,
    "json": 7,
    "completion": 6,
}
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese")
FOLLOW_UPS = (
    "Give me an example.",
    "Can you explain that in simpler words?",
    "Why is that so?",
    "Say it again in one short paragraph.",
    "What should I watch out for?",
    "Rewrite your answer as a numbered list.",
    "And what is the opposite view?",
    "Go into more detail on the last point.",
)
TRANSLATE = ("Translate into {0}:\n\n{1}", "Translate the following text to {0}.\n\n{1}")
ASK_IN = {
    "French": "Réponds en français : {0}",
    "Spanish": "Responde en español: {0}",
    "German": "Antworte auf Deutsch: {0}",
    "Italian": "Rispondi in italiano: {0}",
    "Portuguese": "Responde em português: {0}",
}
SUMMARISE = (
    "Summarize the following text in a few sentences.\n\n{0}",
    "{0}\n\nWhat are the main points of this text?",
    "Write a short summary of this:\n\n{0}",
)
QUESTIONS = (
    "Read the text and say what it is about and who it is for.\n\n{0}",
    "{0}\n\nAccording to this text, what is most important, and why?",
    "Which claims does the following text make? Quote it.\n\n{0}",
    "{0}\n\nWhat does the text not say that a reader would want to know?",
)
LISTS = (
    "Answer as a numbered list of ten items: {0}",
    "Answer with a bulleted list, one short line a point. {0}",
    "Give a Markdown table of the main points, with two columns. {0}",
)
AS_JSON = (
    'Answer with a JSON object with the keys "title", "summary" and "keywords".\n\n{0}',
    'Turn the following text into JSON: a list of objects with "topic" and "detail".\n\n{0}',
    'Extract names, places and numbers from this text as JSON: {{"names": [], "places": [], '
    '"numbers": []}}.\n\n{0}',
)
COMPLETE = (
    "Finish this Python function:\n```python\n{0}\n```",
    "Write the body of this function.\n\n```python\n{0}\n```",
)


class Pool(NamedTuple):
    """Material of the prompts; each item is used at most once for a kind."""

    prompts: list[str]
    texts: list[str]  # answers of the target, in prose
    functions: list[str]  # heads of Python functions, with the lines under them as a comment


Maker = Callable[[random.Random, str], list[str]]


def from_template(*templates: str) -> Maker:
    return lambda rng, text: [rng.choice(templates).format(text)]


def dialogue(rng: random.Random, prompt: str) -> list[str]:
    return [prompt, *rng.sample(FOLLOW_UPS, rng.choice((1, 2)))]


def translation(rng: random.Random, text: str) -> list[str]:
    return [rng.choice(TRANSLATE).format(rng.choice(LANGUAGES), first_sentences(text, 350))]


def other_language(rng: random.Random, prompt: str) -> list[str]:
    return [ASK_IN[rng.choice(LANGUAGES)].format(prompt)]


# Kind → which of a pool it is made from, and how.
MAKERS: dict[str, tuple[str, Maker]] = {
    "plain": ("prompts", lambda _, prompt: [prompt]),
    "dialogue": ("prompts", dialogue),
    "translation": ("texts", translation),
    "other languages": ("prompts", other_language),
    "summary": ("texts", from_template(*SUMMARISE)),
    "question": ("texts", from_template(*QUESTIONS)),
    "list": ("prompts", from_template(*LISTS)),
    "json": ("texts", from_template(*AS_JSON)),
    "completion": ("functions", from_template(*COMPLETE)),
}


def first_sentences(text: str, most: int) -> str:
    """As many whole sentences from the start as fit into `most` characters, or the start."""
    ends = [found.end() for found in re.finditer(r"[.!?](?=\s)", text[:most])]
    return text[: ends[-1] if ends else most].strip()


def first_turn(prompt: str) -> str:
    """The first user turn of a prompt."""
    return prompt.split("<|im_start|>user\n")[1].split("<|im_end|>", maxsplit=1)[0].strip()


def function_head(text: str) -> str | None:
    """The first function of a Python block up to its body, with a docstring if it has one."""
    head = re.search(r'^def \w+\([^\n]*\):\n(?:    """(?:.|\n)*?"""\n)?', text, re.MULTILINE)
    return head and head.group().rstrip()


def collect(target: str, prompts: Path, answers: list[Path]) -> Pool:
    """Plain prompts not answered yet, and what the target wrote."""
    tokenizer = load_tokenizer(target)
    answered, texts, functions = set[str](), [], []
    for path in answers:
        for record in read_records(path):
            if "prompt_ids" not in record:
                fix = "name what `peagle data regenerate` wrote; heads/answers.jsonl.gz is packed"
                raise InputError("its records have no prompt_ids", value=path, fix=fix)
            answered.add(first_turn(tokenizer.decode(record["prompt_ids"])))
            text = tokenizer.decode(record["answer_ids"], skip_special_tokens=True).strip()
            if "```" in text or "def " in text:
                functions.append(function_head(text))
            elif len(text) >= 700:
                texts.append(first_sentences(text, 1500))
    sources = [str(record.get("source", "")) for record in read_records(prompts)]
    plain = [
        turns[0].strip()
        for source, turns in zip(sources, read_prompts(prompts), strict=True)
        if not source.startswith(SHORT_ANSWERS) and turns[0].strip() not in answered
    ]
    return Pool(plain, texts, list(dict.fromkeys(filter(None, functions))))


def split(pool: Pool, rng: random.Random) -> tuple[Pool, Pool]:
    """(to measure on, to train on): a tenth of everything, and the rest."""
    parts = []
    for values in pool:
        shuffled = rng.sample(values, len(values))
        parts.append((shuffled[: len(values) // 10], shuffled[len(values) // 10 :]))
    held_out, used = zip(*parts, strict=True)
    return Pool(*held_out), Pool(*used)


def make(pool: Pool, counts: dict[str, int], rng: random.Random) -> list[dict[str, object]]:
    """Records of each kind, as many as its pool gives, in random order. Kinds made from prompts
    take different ones; plain prompts are what is left over."""
    records: list[dict[str, object]] = []
    prompts = list(pool.prompts)
    for kind in sorted(counts, key=lambda kind: kind == "plain"):
        source, maker = MAKERS[kind]
        if source == "prompts":
            used, prompts = prompts[: counts[kind]], prompts[counts[kind] :]
        else:
            values = getattr(pool, source)
            used = rng.sample(values, min(counts[kind], len(values)))
        records += [{"kind": kind, "turns": maker(rng, text)} for text in used]
    rng.shuffle(records)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path, help='JSONL file of {"turns": [...]}')
    parser.add_argument("answers", type=Path, nargs="+", help="JSONL files of the target's answers")
    parser.add_argument("--output", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--count", type=int, default=9000, help="number of records to train on")
    args = parser.parse_args()

    rng = random.Random(SEED)
    held_out, used = split(collect(args.target, args.prompts, args.answers), rng)
    total = sum(SHARES.values())
    counts = {kind: args.count * share // total for kind, share in SHARES.items()}
    records = make(used, counts, rng)
    third = len(records) // 3
    parts = {
        "greedy": records[third:],
        "sampled": records[:third],
        "held_out": make(held_out, dict.fromkeys(SHARES, HELD_OUT), rng),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in part]
        (args.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}.jsonl: {len(part)} records")


def run(script: Callable[[], None]) -> None:
    """Run a script's `main`; a file that cannot be used is one line, not a traceback."""
    try:
        script()
    except InputError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    run(main)

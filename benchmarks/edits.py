"""Prompts of `trees.py`: rename a variable in each of 20 Python files of about 60 lines.

A file is made from the templates and words of edits.txt: four of eight functions in random order,
over one kind of record.
"""

import random
from pathlib import Path
from string import Template
from typing import NamedTuple

PARTS = 4  # functions of a file, between its first and its last part
ASK = (
    "Rename the variable `{old}` to `{new}` everywhere in this file. Change nothing else, and "
    "answer with the whole file.\n```python\n{file}```"
)


class Words(NamedTuple):
    """The values of a template's names."""

    one: str  # record
    many: str  # the variable that is renamed
    new: str  # its new name
    text: str  # fields of a record
    number: str
    group: str


TABLE, HEAD, *FUNCTIONS, LAST = Path(__file__).with_suffix(".txt").read_text().split("----\n")
WORDS = [Words(*line.split()) for line in TABLE.splitlines()]


def files() -> list[str]:
    """The files, one for each of WORDS."""
    choose = random.Random(24)
    made = []
    for words in WORDS:
        parts = [HEAD, *choose.sample(FUNCTIONS, PARTS), LAST]
        filled = Template("\n\n".join(parts))
        made.append(filled.substitute(words._asdict(), Record=words.one.title()))
    return made


def edits() -> list[str]:
    """The prompts: one for each file."""
    pairs = zip(WORDS, files(), strict=True)
    return [ASK.format(old=words.many, new=words.new, file=file) for words, file in pairs]

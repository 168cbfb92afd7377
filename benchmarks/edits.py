"""An edit set: 20 Python files of about 60 lines, each to be given back with one variable renamed.

    python benchmarks/edits.py        # prints the first question

Made from templates and words: four of eight functions, in some order, over a record of some kind.
"""

import random
from string import Template
from typing import NamedTuple

SEED = 24
PARTS = 4  # functions of a file, beside its first and its last
ASK = (
    "Rename the variable `{old}` to `{new}` everywhere in this file. Change nothing else, and "
    "answer with the whole file.\n```python\n{file}```"
)


class Words(NamedTuple):
    """What the templates are filled with."""

    one: str  # record
    many: str  # the variable that is renamed
    new: str  # its name then
    text: str  # fields of a record
    number: str
    group: str


WORDS = [
    Words(*line.split())
    for line in (
        "invoice invoices bills customer amount currency",
        "book books volumes title price author",
        "sensor sensors probes location temperature kind",
        "flight flights departures code delay airline",
        "recipe recipes dishes name minutes cuisine",
        "player players members nickname score team",
        "ticket tickets issues subject priority owner",
        "parcel parcels shipments address weight carrier",
        "plant plants seedlings species height bed",
        "song songs tracks title seconds artist",
        "employee employees staff name salary department",
        "lesson lessons courses topic hours teacher",
        "city cities towns name population country",
        "order orders purchases product total buyer",
        "workout workouts sessions route distance runner",
        "server servers machines host load zone",
        "movie movies films title rating director",
        "expense expenses outlays purpose cost category",
        "photo photos pictures file megabytes album",
        "star stars suns name magnitude constellation",
    )
]
HEAD = '''"""Read $many from a CSV file and report on them."""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class $Record:
    """One $one."""

    $text: str
    $number: float
    $group: str


def load_$many(path: Path) -> list[$Record]:
    """Read all lines that have a $number."""
    $many = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["$number"]:
                $many.append($Record(line["$text"], float(line["$number"]), line["$group"]))
    return $many
'''
FUNCTIONS = (
    '''def total_$number($many: list[$Record]) -> float:
    """Add up the $number of all $many."""
    return sum($one.$number for $one in $many)
''',
    '''def by_$group($many: list[$Record]) -> dict[str, list[$Record]]:
    """Sort the $many into one list for each $group."""
    found = {}
    for $one in $many:
        found.setdefault($one.$group, []).append($one)
    return found
''',
    '''def largest($many: list[$Record], count: int = 5) -> list[$Record]:
    """Return the $many with the largest $number, largest first."""
    ordered = sorted($many, key=lambda $one: $one.$number, reverse=True)
    return ordered[:count]
''',
    '''def find($many: list[$Record], word: str) -> $Record | None:
    """Return the first $one whose $text contains a word."""
    for $one in $many:
        if word.lower() in $one.$text.lower():
            return $one
    return None
''',
    '''def check($many: list[$Record]) -> None:
    """Raise ValueError if a $one has no $text or a negative $number."""
    for place, $one in enumerate($many, start=1):
        if not $one.$text:
            raise ValueError(f"$one {place} has no $text")
        if $one.$number < 0:
            raise ValueError(f"$one {place} has a negative $number")
''',
    '''def mean_$number($many: list[$Record]) -> float:
    """Return the mean $number, or 0 if there are no $many."""
    if not $many:
        return 0.0
    return sum($one.$number for $one in $many) / len($many)
''',
    '''def save_$many(path: Path, $many: list[$Record]) -> None:
    """Write the $many to a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["$text", "$number", "$group"])
        for $one in $many:
            writer.writerow([$one.$text, $one.$number, $one.$group])
''',
    '''def without_duplicates($many: list[$Record]) -> list[$Record]:
    """Keep the first of all $many with the same $text and $group."""
    seen = set()
    kept = []
    for $one in $many:
        key = ($one.$text, $one.$group)
        if key not in seen:
            seen.add(key)
            kept.append($one)
    return kept
''',
)
LAST = """if __name__ == "__main__":
    $many = load_$many(Path(sys.argv[1]))
    print(len($many), "$many")
"""


def files() -> list[str]:
    """The files, one for each of WORDS."""
    choose = random.Random(SEED)
    made = []
    for words in WORDS:
        parts = [HEAD, *choose.sample(FUNCTIONS, PARTS), LAST]
        filled = Template("\n\n".join(parts))
        made.append(filled.substitute(words._asdict(), Record=words.one.title()))
    return made


def edits() -> list[str]:
    """What is asked."""
    pairs = zip(WORDS, files(), strict=True)
    return [ASK.format(old=words.many, new=words.new, file=file) for words, file in pairs]


if __name__ == "__main__":
    print(edits()[0])

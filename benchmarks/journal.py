"""What was played, written line by line, so that a run that was cut short can go on."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.bench.load import Played, Sample
from peagle.engine.request import Stats

Plays = dict[str, Played]  # by the way they were played


class Journal:
    """A file of JSON lines: what all was measured with, then what was played, in order."""

    def __init__(self, file: Path, about: dict[str, Any], *, resume: bool) -> None:
        """Exits where `resume` finds a file that was measured with anything else."""
        self.file = file
        self.plays = dict[str, dict[int, Plays]]()  # by part and number
        if resume and file.is_file():
            self._read(json.loads(json.dumps(about)))
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(about) + "\n")

    def add(self, part: str, number: int, plays: Plays) -> None:
        """Note what was played at one place of a part, in every way."""
        self.plays.setdefault(part, {})[number] = plays
        kept = {way: _kept(played) for way, played in plays.items()}
        with self.file.open("a") as lines:
            lines.write(json.dumps({"part": part, "number": number, "plays": kept}) + "\n")

    def of(self, part: str) -> dict[int, Plays]:
        """What was played of a part, by number."""
        return self.plays.setdefault(part, {})

    def _read(self, about: dict[str, Any]) -> None:
        text = self.file.read_text()
        whole = text[: text.rfind("\n") + 1]  # the last line may have been cut short
        self.file.write_text(whole)
        before, *lines = map(json.loads, whole.splitlines())
        other = sorted(key for key in about if before.get(key) != about[key])
        if other:
            sys.exit(f"{self.file}: measured with other {', '.join(other)}: leave out --resume")
        for line in lines:
            plays = {way: _played(**kept) for way, kept in line["plays"].items()}
            self.plays.setdefault(line["part"], {})[line["number"]] = plays


def _kept(played: Played) -> dict[str, Any]:
    samples = [asdict(sample) | {"text": ""} for sample in played.samples]
    return {"seconds": played.seconds, "samples": samples, "drafting": asdict(played.drafting)}


def _played(seconds: float, samples: list[dict[str, Any]], drafting: dict[str, Any]) -> Played:
    asked = [Sample(**sample | {"output": tuple(sample["output"])}) for sample in samples]
    return Played(asked, seconds, Stats(**drafting), whole=True)

"""A stand-in for kubectl; entries to deploy."""

import json
import sys
from pathlib import Path
from typing import Any

from peagle.catalog import CatalogHead, Entry

KUBECTL = """\
#!{python}
import json, sys
from pathlib import Path
given = sys.stdin.read() if "-" in sys.argv else ""
with Path({log!r}).open("a") as log:
    log.write(json.dumps([sys.argv[1:], given]) + "\\n")
answers = json.loads(Path({answers!r}).read_text())
verb = next(word for word in sys.argv[1:] if word in ("get", "apply", "logs", "delete"))
code, out, err = answers.get(verb, [0, "done\\n", ""])
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Kubectl:
    """Recorded calls, and answers by verb: exit code, stdout, stderr."""

    def __init__(self, folder: Path) -> None:
        self._log, self._answers = folder / "log", folder / "answers"
        program = folder / "kubectl"
        paths = {"log": str(self._log), "answers": str(self._answers)}
        program.write_text(KUBECTL.format(python=sys.executable, **paths))
        program.chmod(0o755)
        self.answer()

    def answer(self, **answers: tuple[int, str, str]) -> None:
        self._answers.write_text(json.dumps({"get": [0, "", ""], **answers}))

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(arguments, given) for arguments, given in map(json.loads, lines)]


def entry(**other: Any) -> Entry:
    heads = {"p-eagle": CatalogHead(k=5, hub="owner/head")}
    return Entry(**{"target": "owner/model", "heads": heads, **other})

"""A terminal is told what happens until the first token; nothing else is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from runner import invoke

from peagle.cli import common
from peagle.engine import shared
from peagle.engine.engine import Engine
from peagle.server import run as server

Steps = list[tuple[str, str | None]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """A step, and the first word of the spinner that is shown meanwhile."""
    done, shown = Steps(), list[str]()

    @contextmanager
    def status(text: str) -> Iterator[None]:
        assert not shown, "one at a time"
        shown.append(text.split(maxsplit=1)[0])
        yield
        shown.pop()

    def note(owner: Any, name: str) -> None:
        known = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            entry = (name, shown[-1] if shown else None)
            if done[-1:] != [entry]:
                done.append(entry)
            return known(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(common.screen, "status", status)
    note(shared, "weight_sizes")
    note(shared.costs, "verify_curve")
    note(Engine, "step")
    note(typer, "secho")
    return done


LOADED = [("weight_sizes", "loading"), ("verify_curve", "preparing")]
ANSWER = [("step", "reading"), ("secho", None)]
ASK = ("--method", "lookup", "--max-tokens", 1)


def test_generate(target: Path, seen: Steps) -> None:
    invoke("generate", target, "the cat sat", *ASK)
    assert seen == LOADED + ANSWER
    seen.clear()
    invoke("generate", target, "the cat sat", *ASK, "--json")
    assert seen == [*LOADED, ("step", "answering")]


def test_chat_measures_before_typing(target: Path, seen: Steps) -> None:
    invoke("chat", target, *ASK, stdin="hello\nagain\n")
    assert seen == LOADED + ANSWER + ANSWER


def test_serve(target: Path, seen: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "log_to_stderr", lambda: None)
    monkeypatch.setattr(server.Server, "run", lambda self, **_: setattr(self, "started", True))
    invoke("serve", target, "--engine", "native", "--method", "lookup", "--port", 0)
    assert seen == LOADED


def test_no_terminal_sees_a_spinner(target: Path) -> None:
    assert invoke("generate", target, "the cat sat", *ASK).stderr == ""

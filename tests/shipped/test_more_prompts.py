"""heads/more.py asks what its files have: as many prompts of a kind as there are texts for it. It
writes all answers, or none."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = ("answers", "prompts", "more")  # of modules in heads/; tests have an `answers`, too


@pytest.fixture
def more(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "heads")
    yield import_module("more")
    for name in NAMES:
        del sys.modules[name]


@pytest.mark.parametrize("count", [0, 3])
def test_few_texts_give_few_prompts(more: Any, count: int) -> None:
    texts = [f"A text, number {n}. It is about cats." for n in range(count)]
    pool = more.Pool(["why?"], texts, ["def f():"])
    asked = more.could_be_asked(more.Material(pool, short=texts, plain=texts))
    kinds = len(more.OF_TEXTS) + len(more.OF_PROMPTS)
    assert len(asked) == 1 + count * (1 + kinds) + len(more.COMPLETE)


@pytest.mark.parametrize("left", [False, True])
def test_a_run_that_is_stopped_leaves_no_part(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """data.sh would take it for the whole; what a kill left is not kept either."""
    monkeypatch.setattr(sys, "argv", ["more.py", "prompts", str(tmp_path), "answers"])
    monkeypatch.setattr(more, "Packed", lambda lines: None)
    monkeypatch.setattr(more, "lines_of", lambda packed, output: [])
    monkeypatch.setattr(more, "material", lambda *files: None)
    monkeypatch.setattr(more, "could_be_asked", lambda made_from: [["a"], ["b"], ["c"]])
    output = tmp_path / "more.jsonl"
    stopped = [2]

    def answered(engine: None, number: int, turns: list[str]) -> Any:
        if number in stopped:
            raise KeyboardInterrupt
        return SimpleNamespace(lines=[{"record": number}]) if number != 1 else None

    monkeypatch.setattr(more, "answered", answered)
    with pytest.raises(KeyboardInterrupt):
        more.main()
    assert list(tmp_path.iterdir()) == []
    if left:
        (tmp_path / ".more.jsonl").write_text('{"record": 7}\n')
    stopped.clear()
    more.main()
    assert output.read_text() == '{"record": 0}\n{"record": 2}\n'
    assert list(tmp_path.iterdir()) == [output]

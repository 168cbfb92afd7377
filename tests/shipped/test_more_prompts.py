"""heads/more.py asks what its files have: as many prompts of a kind as there are texts for it."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
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

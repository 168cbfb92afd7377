"""`benchmarks/load.py` for half a minute: nothing is lost, kept or wrong, whoever leaves."""

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("load")


@pytest.mark.slow
def test_under_load(load) -> None:
    report = load.run(seconds=30)
    assert report["problems"] == []
    assert report["finished"] > 0 and report["left"] > 0 and report["checked"] > 0


def test_wrong_answers_are_seen(load) -> None:
    llm = load.make_llm(None)
    body = {"prompt": "the cat", "stream": True, "max_tokens": 5, "temperature": 0.9, "seed": 3}
    [right] = llm.generate(["the cat"], load.SamplingParams(0.9, max_tokens=5, seed=3))
    assert load.wrong_answers(llm, [{"body": body, "text": right.text}]) == []
    [wrong] = load.wrong_answers(llm, [{"body": body, "text": right.text + "!"}])
    assert wrong["alone"] == right.text

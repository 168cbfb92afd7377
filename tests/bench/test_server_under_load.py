"""`benchmarks/load.py` for half a minute: no leak and no wrong answer when clients disconnect."""

import pytest


@pytest.fixture
def load(benchmark_script):
    return benchmark_script("load")


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

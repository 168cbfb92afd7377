"""`clients_that_leave.py` for half a minute: no leak, no wrong answer when clients disconnect."""

import clients_that_leave as load
import pytest


@pytest.mark.slow
def test_under_load() -> None:
    report = load.run(seconds=30)
    assert report["problems"] == []
    assert report["finished"] > 0 and report["left"] > 0 and report["checked"] > 0


def test_wrong_answers_are_seen() -> None:
    llm = load.make_llm(None)
    body = {"prompt": "the cat", "stream": True, "max_tokens": 5, "temperature": 0.9, "seed": 3}
    [right] = llm.generate(["the cat"], load.SamplingParams(0.9, max_tokens=5, seed=3))
    assert load.wrong_answers(llm, [{"body": body, "text": right.text}]) == []
    [wrong] = load.wrong_answers(llm, [{"body": body, "text": right.text + "!"}])
    assert wrong["alone"] == right.text

"""The process that tries grammars: it survives them, and its verdicts are right."""

import gc
import json
import os
import signal
import threading

import pytest
from llguidance import LLMatcher
from tiny import make_target

from peagle.engine import judge as judges
from peagle.engine.grammars import LIMITS, Grammars, measure, too_large
from peagle.engine.judge import Judge
from peagle.engine.params import SamplingParams
from peagle.errors import InputError


def chain(size: int) -> str:
    links = [f'T{i}: "a" T{i + 1}' for i in range(size)]
    return "\n".join(["start: T0", *links, f'T{size}: "b"'])


@pytest.fixture
def judge() -> Judge:
    tokenizer = make_target().tokenizer
    assert tokenizer is not None
    return Judge(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [2], LIMITS)


def test_verdicts(judge: Judge) -> None:
    """What crashes the compiler is refused; what is merely wrong is not the judge's business."""
    crashing = LLMatcher.grammar_from_lark(chain(4000))
    assert "breaks the compiler (SIGSEGV): make it smaller" in (judge.refusal(crashing) or "")
    for fine in (chain(300), 'start: "a" b', "start: ("):
        assert judge.refusal(LLMatcher.grammar_from_lark(fine)) is None
    assert judge.refusal(LLMatcher.grammar_from_regex("[a-z]+")) is None


def test_time(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "SECONDS", 1)
    tokenizer = make_target().tokenizer
    assert tokenizer is not None
    hasty = Judge(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [2], LIMITS)
    slow = "start: " + " | ".join(json.dumps(f"choice {i}") for i in range(50000))
    assert "takes more than 1 seconds" in (hasty.refusal(LLMatcher.grammar_from_lark(slow)) or "")


def test_verdicts_are_kept(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()
    attempt = judge._try
    monkeypatch.setattr(judge, "_try", lambda grammar: tried.append(grammar) or attempt(grammar))
    monkeypatch.setattr(judges, "MOST_VERDICTS", 2)
    for grammar in ("a", "b", "a", "c", "c", "a"):
        assert judge.refusal(LLMatcher.grammar_from_regex(grammar)) is None
    assert len(tried) == 4, "the oldest of three is forgotten"


def test_a_judge_that_was_killed(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes its place; one that cannot start is told of."""
    one, other, third = map(LLMatcher.grammar_from_regex, ("a", "b", "c"))
    assert judge.refusal(one) is None
    assert judge._process is not None
    os.kill(judge._process.pid, signal.SIGKILL)
    assert judge.refusal(other) is None
    judge._process.kill()
    monkeypatch.setattr(judges, "PROGRAM", judges.PROGRAM.with_name("none.py"))
    with pytest.raises(RuntimeError, match="grammars cannot be tried"):
        judge.refusal(third)


def test_it_ends_with_its_object() -> None:
    grammars = Grammars(make_target())
    grammars.matcher(SamplingParams(regex="a"))
    process = grammars._judge._process
    assert process is not None and process.poll() is None
    del grammars
    gc.collect()
    assert process.poll() is not None


def test_threads(judge: Judge) -> None:
    """Each gets the verdict of its own grammar."""
    grammars = {LLMatcher.grammar_from_lark(chain(n)): n for n in (10, 4000, 20, 5000, 30, 6000)}
    found = dict[int, bool]()

    def ask(grammar: str, size: int) -> None:
        found[size] = judge.refusal(grammar) is None

    threads = [threading.Thread(target=ask, args=pair) for pair in grammars.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {size: size < 100 for size in grammars.values()}


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("regex", "a" * 300_000, "it has 300000 bytes, at most 262144 are compiled"),
        ("grammar", chain(1000), "it has 1002 rules, at most 1000 are compiled"),
        ("json_schema", "[" * 65 + "]" * 65, "it is 65 levels deep, at most 64 are compiled"),
        (
            "json_schema",
            json.dumps({"$defs": {str(i): {"definitions": {"a": {}}} for i in range(501)}}),
            "it has 1002 rules, at most 1000 are compiled",
        ),
    ],
)
def test_what_is_not_even_tried(form: str, text: str, said: str) -> None:
    assert said in (too_large(form, text) or "")


def test_what_is_tried() -> None:
    assert too_large("json_schema", "[" * 64 + "]" * 64) is None
    assert too_large("grammar", chain(998)) is None
    assert measure({"a": [{"$defs": {"b": {}, "c": {"d": 1}}}]}) == (5, 2)


def test_refused_before_it_is_compiled_here() -> None:
    """A crash of this process would show that it was not."""
    deep = {f"p{i}": {"properties": {"a": {"$ref": f"#/properties/p{i + 1}"}}} for i in range(3000)}
    schema = {"$ref": "#/properties/p0", "properties": {**deep, "p3000": {"type": "null"}}}
    grammars = Grammars(make_target())
    with pytest.raises(InputError, match="json_schema .* breaks the compiler"):
        grammars.matcher(SamplingParams(json_schema=schema))
    assert grammars.matcher(SamplingParams(json_schema={"type": "null"})) is not None

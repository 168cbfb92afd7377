"""The process that tries grammars: it survives them, and its verdicts are right."""

import gc
import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher
from refusals import refused
from tiny import make_target

from peagle.engine import grammar_checker
from peagle.engine.grammar_checker import GrammarChecker
from peagle.engine.grammars import LIMITS, Grammars
from peagle.engine.params import SamplingParams
from peagle.errors import InputError


def chain(size: int) -> str:
    links = [f'T{i}: "a" T{i + 1}' for i in range(size)]
    return "\n".join(["start: T0", *links, f'T{size}: "b"'])


def new_checker() -> GrammarChecker:
    tokenizer = make_target().tokenizer
    assert tokenizer is not None
    return GrammarChecker(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [2], LIMITS)


checker = pytest.fixture(new_checker)


def test_verdicts(checker: GrammarChecker) -> None:
    """Grammars that crash the compiler are refused; merely wrong ones pass the checker."""
    crashing = LLMatcher.grammar_from_lark(chain(4000))
    assert "breaks the compiler (SIGSEGV)" in (checker.refusal(crashing) or "")
    for fine in (chain(300), 'start: "a" b', "start: ("):
        assert checker.refusal(LLMatcher.grammar_from_lark(fine)) is None
    assert checker.refusal(LLMatcher.grammar_from_regex("[a-z]+")) is None


def test_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "SECONDS", 1)
    slow = "start: " + " | ".join(json.dumps(f"choice {i}") for i in range(50000))
    why = new_checker().refusal(LLMatcher.grammar_from_lark(slow))
    assert why == "takes more than 1 seconds to compile"


def test_a_killed_checker(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes its place; one that cannot start is told of."""
    one, other, third = map(LLMatcher.grammar_from_regex, ("a", "b", "c"))
    assert checker.refusal(one) is None
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    assert checker.refusal(other) is None
    checker._process.kill()
    monkeypatch.setattr(grammar_checker, "PROGRAM", grammar_checker.PROGRAM.with_name("none.py"))
    with pytest.raises(RuntimeError, match="grammars cannot be tried"):
        checker.refusal(third)


def test_a_checker_that_ends_before_it_has_read_a_large_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checker, "PROGRAM", grammar_checker.PROGRAM.with_name("none.py"))
    checker = GrammarChecker(" " * 2**20, 128, [2], LIMITS)
    checker.start()
    with pytest.raises(RuntimeError, match="grammars cannot be tried"):
        checker.refusal("")
    grammars = Grammars(make_target())
    grammars.warm_up()  # nobody has asked for a grammar
    with pytest.raises(RuntimeError, match="grammars cannot be tried"):
        grammars.matcher(SamplingParams(regex="a"))


def test_a_checker_of_a_process_with_many_open_files(checker: GrammarChecker) -> None:
    """As a server with a thousand connections has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert checker.refusal(LLMatcher.grammar_from_regex("[a-z]+")) is None
        assert checker._process is not None and checker._process.stdout is not None
        assert checker._process.stdout.fileno() >= 1024
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_ends_with_its_object() -> None:
    grammars = Grammars(make_target())
    grammars.matcher(SamplingParams(regex="a"))
    process = grammars._checker._process
    assert process is not None and process.poll() is None
    del grammars
    gc.collect()
    assert process.poll() is not None


def test_threads(checker: GrammarChecker) -> None:
    """Each gets the verdict of its own grammar."""
    sizes = (10, 4000, 20, 5000, 30, 6000)
    grammars = [LLMatcher.grammar_from_lark(chain(size)) for size in sizes]
    with ThreadPoolExecutor(len(sizes)) as threads:
        refusals = list(threads.map(checker.refusal, grammars))
    assert [refusal is None for refusal in refusals] == [size < 100 for size in sizes]


def nested(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        ("regex", "a" * 300_000, "300000 bytes, at most 262144"),
        ("grammar", chain(4000), "breaks the compiler"),
        ("json_schema", nested(300), "recursion limit"),
    ],
)
def test_grammars_that_are_too_large(form: str, text: str, why: str) -> None:
    with refused(form) as found:
        Grammars(make_target()).matcher(SamplingParams(**{form: text}))
    assert why in found.value.why


def test_a_schema_that_is_nested_too_deeply_to_be_read() -> None:
    """The text is Python's, so no other test compares it."""
    with pytest.raises(InputError) as found:
        SamplingParams(json_schema=nested(100_000))
    assert found.value.field == "json_schema"


def test_large_grammars() -> None:
    grammars = Grammars(make_target())
    grammars.matcher(SamplingParams(json_schema=nested(70)))
    grammars.matcher(SamplingParams(grammar=chain(998)))


def test_refused_before_it_is_compiled_here() -> None:
    """A crash of this process would show that it was not."""
    deep = {f"p{i}": {"properties": {"a": {"$ref": f"#/properties/p{i + 1}"}}} for i in range(3000)}
    schema = {"$ref": "#/properties/p0", "properties": {**deep, "p3000": {"type": "null"}}}
    grammars = Grammars(make_target())
    with refused("json_schema"):
        grammars.matcher(SamplingParams(json_schema=schema))
    assert grammars.matcher(SamplingParams(json_schema={"type": "null"})) is not None

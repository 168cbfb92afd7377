"""Answers end and are streamed as in plain decoding, token for token."""

import pytest
from answers import alone, outcome, token_ids
from oracle import Oracle, end_at
from tiny import METHODS, make_drafter, make_target, make_tokenizer, random_prompts

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.run import Completion
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPTS = [prompt for prompt in random_prompts(12, seed=5) if len(prompt) > 2][:5]
K, LENGTH = 5, 24


@pytest.fixture(scope="module")
def target() -> Target:
    """Its answers hardly repeat."""
    return make_target(seed=2, spread=0.3)


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Drafter]:
    return {method: make_drafter(target, method) for method in METHODS}


@pytest.fixture(scope="module")
def unstopped(target: Target) -> list[list[int]]:
    """The target's outputs without any stop."""
    params = SamplingParams(max_tokens=LENGTH + K, ignore_eos=True)
    done = LLM(target, max_batch=5).generate(PROMPTS, params)
    return [p + c.token_ids for p, c in zip(PROMPTS, done, strict=True)]


@pytest.fixture
def answer(unstopped: list[list[int]], oracle: Oracle) -> list[int]:
    """The first of them; the oracle knows all."""
    oracle.futures = unstopped
    return unstopped[0][len(PROMPTS[0]) :]


def plain_text(target: Target, ids: list[int]) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=True)


def both(
    target: Target, drafter: Drafter, params: SamplingParams, prompts: list[list[int]] = PROMPTS
) -> list[Completion]:
    """Decode with and without; they agree; returns the speculative completions."""
    done = LLM(target, drafter, k=K, max_batch=3).generate(prompts, params)
    assert outcome(done) == outcome(alone(target, prompts, params, max_batch=3))
    return done


@pytest.mark.parametrize("at", [0, 1, 3, 5, 6, 7, 11])  # before, in and behind accepted runs
def test_eos_inside_an_accepted_run(
    target: Target, p_eagle: Drafter, answer: list[int], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    end_at(monkeypatch, target, 126, answer[at])
    first = answer.index(answer[at])
    done = both(target, p_eagle, SamplingParams(max_tokens=LENGTH))[0]
    assert done.finish_reason == "stop"
    assert done.token_ids == answer[: first + 1]
    assert done.text == plain_text(target, answer[:first]), "the eos is not in the text"
    if first > 0:
        assert done.stats.rounds == -(-first // (K + 1))
        full = [done.stats.rounds] * K
        assert done.stats.accepted == full, "accepted drafts behind the eos count, as in vLLM"


def test_ignore_eos(
    target: Target, p_eagle: Drafter, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at(monkeypatch, target, answer[2])
    done = both(target, p_eagle, SamplingParams(max_tokens=LENGTH, ignore_eos=True))[0]
    assert (done.finish_reason, done.token_ids) == ("length", answer[:LENGTH])


def test_tokenizer_eos_ends_too(
    target: Target, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(answer[3])
    monkeypatch.setattr(target, "tokenizer", tokenizer)
    done = LLM(target).generate(PROMPTS[:1], SamplingParams(max_tokens=LENGTH))[0]
    assert done.token_ids == answer[: answer.index(answer[3]) + 1]


@pytest.mark.parametrize(("begin", "width"), [(0, 1), (3, 1), (5, 3), (9, 5), (2, 9)])
def test_stop_string_inside_an_accepted_run(
    target: Target, p_eagle: Drafter, answer: list[int], begin: int, width: int
) -> None:
    """The stop string is cut from the text; tokens end with the one that completed it."""
    text = plain_text(target, answer[:LENGTH])
    stop = text[begin : begin + width]
    params = SamplingParams(max_tokens=LENGTH, stop=("\x00never", stop))
    done = both(target, p_eagle, params)[0]
    assert done.finish_reason == "stop"
    assert done.text == text[: text.index(stop)]
    tokens = next(n for n in range(LENGTH) if stop in plain_text(target, answer[:n]))
    assert done.token_ids == answer[:tokens]


def test_stop_strings_span_tokens(target: Target, answer: list[int]) -> None:
    """Substrings of four characters stop where plain search finds them first."""
    text = plain_text(target, answer[:LENGTH])
    llm = LLM(target)
    for begin in range(0, len(text) - 4, 3):
        stop = text[begin : begin + 4]
        done = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=LENGTH, stop=(stop,)))[0]
        assert done.text == text[: text.index(stop)]


def test_held_back_text_is_given_at_the_end(target: Target, answer: list[int]) -> None:
    """A stop string that begins but never completes stays in the text."""
    text = plain_text(target, answer[:LENGTH])
    params = SamplingParams(max_tokens=LENGTH, stop=(text[-2:] + "\x00",))
    done = LLM(target).generate(PROMPTS[:1], params)[0]
    assert (done.text, done.finish_reason) == (text, "length")


@pytest.mark.parametrize("stop", [(), ("z",), ("ab", "!?")])
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.usefixtures("answer")
def test_streamed_chunks_are_the_text(
    target: Target, p_eagle: Drafter, oracle: Oracle, stop: tuple[str, ...], error_rate: float
) -> None:
    oracle.error_rate = error_rate
    params = SamplingParams(max_tokens=LENGTH, stop=stop)
    run = LLM(target, p_eagle, k=K, max_batch=2).stream(PROMPTS, params)
    chunks = list(run)
    for index, completion in enumerate(run.completions()):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == completion.text
        if not stop:
            flags = zip(completion.token_ids, completion.drafted, strict=True)
            visible = [flag for token, flag in flags if plain_text(target, [token])]
            assert [chunk.drafted for chunk in own] == visible
    assert any(chunk.drafted for chunk in chunks) and not all(chunk.drafted for chunk in chunks)
    assert run.seconds > 0


def test_chunks_come_as_they_are_decided(target: Target) -> None:
    run = LLM(target).stream([[70, 71]], SamplingParams(max_tokens=6))
    first = next(iter(run))
    assert first.text and len(run.requests[0].output) == 1


def test_a_seed_repeats(target: Target, drafter: Drafter) -> None:
    llm = LLM(target, drafter, k=3, max_batch=2)

    def say(seed: int | None) -> list[list[int]]:
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=20)
        return token_ids(llm.generate(PROMPTS, params))

    assert say(1) == say(1)
    assert say(1) != say(2)
    assert say(None) != say(None)


def test_answers_come_as_they_end(target: Target) -> None:
    """Each with its number, while the others go on; `generate` puts them in order."""
    lengths = (6, 2, 4)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    llm = LLM(target, max_batch=3)
    run = llm.stream(PROMPTS[:3], params)
    ended = run.ended()
    number, first = next(ended)
    assert (number, len(first.token_ids)) == (1, 2)
    assert [request.finish_reason for request in run.requests] == [None, "length", None]
    rest = list(ended)
    assert [number for number, _ in rest] == [2, 0]
    done = llm.generate(PROMPTS[:3], params)
    assert [len(answer.token_ids) for answer in done] == list(lengths)
    assert outcome(done) == outcome([rest[1][1], first, rest[0][1]])


def test_answers_that_nobody_waits_for_are_cancelled(target: Target) -> None:
    llm = LLM(target, max_batch=2)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 2)]
    run = llm.stream(PROMPTS[:2], params)
    ended = run.ended()
    next(ended)
    del ended
    assert run.requests[0].finish_reason == "abort" and run.engine.idle

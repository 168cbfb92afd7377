"""Several LLMs over one target, and several runs and threads of one LLM: each gets exactly what it
gets alone."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import pytest
import torch
from answers import accepted, token_ids
from tiny import make_drafter, make_target, own_answers, random_prompts
from trained_heads import trained_head

from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Chunk
from peagle.engine.run import Completion, Run
from peagle.engine.text import TextStream
from peagle.model.drafter import Drafter
from peagle.model.target import Target

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
PARAMS = [GREEDY, SAMPLED, GREEDY, replace(SAMPLED, repetition_penalty=1.2), GREEDY]
PROMPTS, OTHERS = random_prompts(5, seed=9), random_prompts(5, seed=10)
K = 4

Make = Callable[[], LLM]


@pytest.fixture(scope="module")
def heads(
    target: Target, drafters: dict[str, Drafter], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Drafter, Drafter]:
    """A P-EAGLE and an EAGLE-3 head, which read different layers."""
    data, folder = own_answers(target, 64), tmp_path_factory.mktemp("other")
    other = trained_head(target, "eagle3", data, folder, layers=(0, 1, 2))
    return drafters["p-eagle"], other


@pytest.fixture(params=["fast, exact", "exact, fast", "fast, fast", "used, used", "fast, no head"])
def pair(
    request: pytest.FixtureRequest, target: Target, heads: tuple[Drafter, Drafter]
) -> tuple[Make, Make]:
    """Functions that make two LLMs over the target."""
    one, other = heads
    shared = LLM(target)
    kinds: dict[str, tuple[Make, Make]] = {
        "fast": (lambda: LLM(target, one, k=K, max_batch=3), lambda: LLM(target, other, k=K - 1)),
        "exact": (
            lambda: LLM(target, one, k=K, max_batch=3, deterministic=True),
            lambda: LLM(target, other, k=K - 1, deterministic=True),
        ),
        "used": (lambda: shared.use(one, K), lambda: shared.use(other, K - 1)),
        "no head": (lambda: LLM(target, nodes=8), lambda: LLM(target, nodes=8)),
    }
    first, second = request.param.split(", ")
    return kinds[first][0], kinds[second][1]


def alone(llm: LLM, prompts: list[list[int]]) -> list[Completion]:
    return llm.generate(prompts, PARAMS)


def round_by_round(*runs: Run) -> list[list[Chunk]]:
    """The chunks of each run; the runs step in turns."""
    emitted: list[list[Chunk]] = [[] for _ in runs]
    while any(request.finish_reason is None for run in runs for request in run.requests):
        for run, own in zip(runs, emitted, strict=True):
            own.extend(run.step())
    return emitted


def token_by_token(*runs: Run) -> list[list[Chunk]]:
    turns = list(zip_longest(*runs))
    return [[chunk for chunk in own if chunk is not None] for own in zip(*turns, strict=True)]


def check_chunks(run: Run, chunks: list[Chunk]) -> None:
    """Nothing that was emitted is lost."""
    for index, done in enumerate(run.completions()):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == done.text
        assert [chunk.logprob for chunk in own] == done.logprobs


@pytest.mark.parametrize("in_turns", [round_by_round, token_by_token])
def test_two_streams(pair: tuple[Make, Make], in_turns: Callable[..., list[list[Chunk]]]) -> None:
    """Tokens, texts, log-probabilities, and how drafts fared, to the bit."""
    wanted = [alone(make(), prompts) for make, prompts in zip(pair, (PROMPTS, OTHERS), strict=True)]
    assert accepted(wanted[0]) > 5, "drafts are accepted"
    one, two = pair[0]().stream(PROMPTS, PARAMS), pair[1]().stream(OTHERS, PARAMS)
    for run, chunks in zip((one, two), in_turns(one, two), strict=True):
        check_chunks(run, chunks)
    assert [one.completions(), two.completions()] == wanted


def test_a_stream_in_the_middle_of_another(pair: tuple[Make, Make]) -> None:
    """A whole one, and one that is left."""
    wanted = alone(pair[0](), PROMPTS), alone(pair[1](), OTHERS)
    run, other = pair[0]().stream(PROMPTS, PARAMS), pair[1]()
    for _ in range(3):
        run.step()
    assert alone(other, OTHERS) == wanted[1]
    left = other.stream(OTHERS, PARAMS)
    left.step()
    left.close()
    list(run)
    assert run.completions() == wanted[0]


@pytest.mark.parametrize("in_turns", [round_by_round, token_by_token])
@pytest.mark.parametrize("exact", [False, True])
def test_two_streams_of_one_llm(
    target: Target, p_eagle: Drafter, exact: bool, in_turns: Callable[..., list[list[Chunk]]]
) -> None:
    """Its engine batches them; that may only change roundings, and in the exact mode nothing."""
    apart = partial(LLM, target, p_eagle, k=K, deterministic=exact)
    wanted = [alone(apart(), prompts) for prompts in (PROMPTS, OTHERS)]
    llm = apart(max_batch=4)
    runs = [llm.stream(prompts, PARAMS) for prompts in (PROMPTS, OTHERS)]
    for run, chunks in zip(runs, in_turns(*runs), strict=True):
        check_chunks(run, chunks)
    for run, own in zip(runs, wanted, strict=True):
        assert token_ids(run.completions()) == token_ids(own)
        for found, one in zip(run.completions(), own, strict=True):
            assert found.logprobs is not None and one.logprobs is not None
            if exact:
                assert found.logprobs == one.logprobs
            mine = [entry.logprob for entry in found.logprobs]
            assert mine == pytest.approx([entry.logprob for entry in one.logprobs], abs=1e-4)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """They meet in as many places as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def together(calls: list[Callable[[], list[Completion]]]) -> list[list[Completion]]:
    """The results of calls in a thread each."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], list[Completion]]) -> list[Completion]:
        begin.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


THREADS = [random_prompts(4, seed=20 + number) for number in range(3)]


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_of_one_llm(dtype: torch.dtype) -> None:
    target, params = in_dtype(dtype), [GREEDY, SAMPLED, GREEDY, SAMPLED]
    drafter = make_drafter(target, "p-eagle").to(dtype)

    def make() -> LLM:
        return LLM(target, drafter, k=K, deterministic=dtype != torch.float32)

    wanted = [make().generate(prompts, params) for prompts in THREADS]
    for _ in range(3):
        llm = make()
        calls = [partial(llm.generate, own, params) for own in THREADS]
        found = together(calls)
        assert list(map(token_ids, found)) == list(map(token_ids, wanted))
        assert llm.engine.idle and llm.engine.scheduler.pool.free == llm.engine.scheduler.pool.count


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_with_llms_of_their_own(dtype: torch.dtype) -> None:
    """Different heads and modes over one target."""
    target, params = in_dtype(dtype), [GREEDY, SAMPLED, GREEDY, SAMPLED]
    one = make_drafter(target, "p-eagle").to(dtype)
    other = make_drafter(target, "eagle3", layers=1).to(dtype)

    def make() -> list[LLM]:
        llm = LLM(target, one, k=K)
        return [llm, llm.use(None, lookup=False), LLM(target, other, k=2, deterministic=True)]

    wanted = [llm.generate(prompts, params) for llm, prompts in zip(make(), THREADS, strict=True)]
    for _ in range(3):
        pairs = zip(make(), THREADS, strict=True)
        calls = [partial(llm.generate, prompts, params) for llm, prompts in pairs]
        assert together(calls) == wanted


class WatchedLock:
    """An engine's lock that calls `on_enter` whenever it is about to be taken."""

    def __init__(self, engine: Engine, on_enter: Callable[[], None]) -> None:
        self.lock, self.on_enter = engine.lock, on_enter

    def __enter__(self) -> None:
        self.on_enter()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_round_takes_the_lock_no_more_often_for_many_prompts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run of thousands would mostly ask for text that is not there."""
    counts = list[int]()
    for prompts in (PROMPTS[:1], PROMPTS * 4):
        run, taken = LLM(target, nodes=8, max_batch=1).stream(prompts, GREEDY), list[None]()
        run.step()
        lock = WatchedLock(run.engine, partial(taken.append, None))
        monkeypatch.setattr(run.engine, "lock", lock)
        run.step()
        counts.append(len(taken))
        run.close()
    assert counts[0] == counts[1]


def test_an_answer_is_whole_that_another_threads_round_ends(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is in the middle of its end: its text is not yet all there."""
    llm = LLM(target, nodes=8)
    [whole] = llm.generate(PROMPTS[:1], GREEDY)
    params = replace(GREEDY, stop=(whole.text[-2:] + "\0",))  # its beginning is held back
    run, finish = llm.stream(PROMPTS[:1], params), TextStream.finish
    inside, asked = threading.Event(), threading.Event()

    def slow(text: TextStream) -> str:
        inside.set()
        asked.wait()
        return finish(text)

    def rounds() -> None:
        while not llm.engine.idle:
            llm.engine.step()

    def step() -> list[Chunk]:
        other.start()
        inside.wait()
        return []

    def on_enter() -> None:
        if threading.current_thread() is not other:
            asked.set()

    other = threading.Thread(target=rounds, daemon=True)
    llm.engine.add(*run.requests)
    monkeypatch.setattr(TextStream, "finish", slow)
    monkeypatch.setattr(run, "step", step)
    monkeypatch.setattr(llm.engine, "lock", WatchedLock(llm.engine, on_enter))
    [(_, answer)] = run.ended()
    asked.set()
    other.join()
    assert (answer.text, answer.token_ids) == (whole.text, whole.token_ids)


def in_dtype(dtype: torch.dtype) -> Target:
    target = make_target()
    return Target(target.model.to(dtype), target.tokenizer, target.name)


def test_a_stream_that_is_handed_from_thread_to_thread(target: Target) -> None:
    """Its number of nodes is fixed: measured times would decide over it otherwise."""
    wanted = alone(LLM(target, nodes=8), PROMPTS)
    run = LLM(target, nodes=8).stream(PROMPTS, PARAMS)
    while any(request.finish_reason is None for request in run.requests):
        step = threading.Thread(target=run.step)
        step.start()
        step.join()
    assert run.completions() == wanted


def test_a_deleted_llm_is_forgotten_at_once(target: Target, heads: tuple[Drafter, Drafter]) -> None:
    """Without waiting for the collector of cycles: nobody keeps an engine but its LLM and runs."""

    def engine_of_a_run(llm: LLM) -> weakref.ref[Engine]:
        run = llm.stream(PROMPTS, PARAMS)
        run.step()
        return weakref.ref(run.engine)

    gc.disable()
    try:
        llm = LLM(target, heads[0])
        engine = engine_of_a_run(llm.use(heads[1]))
        assert engine() is None
        engine = engine_of_a_run(llm)
        del llm
        assert engine() is None
    finally:
        gc.enable()

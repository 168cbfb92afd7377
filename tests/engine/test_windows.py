"""Targets whose layers all have a window: their requests free what no layer reads any more, and
output is the model's own."""

import random
from functools import cache

import pytest
import torch
from families import PLAIN, build
from refusals import refused
from tiny import make_drafter, make_tokenizer
from transformers import MistralConfig, PreTrainedModel

from peagle.backends.choose import choose_backend
from peagle.backends.torch import TorchBackend
from peagle.engine.blocks import ROOT
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.model.target import Target

WINDOW, CHUNK = 37, 20
BACKENDS = {
    "native": choose_backend(torch.device("cpu"), torch.float32),
    "torch": TorchBackend(),
    "exact": TorchBackend(exact=True),
}
PROMPT, ANSWER = 90, 110


def built(window: int) -> PreTrainedModel:
    sizes = PLAIN | {"vocab_size": 128, "max_position_embeddings": 400}
    return build(MistralConfig(**sizes, sliding_window=window))


@cache
def target_of(window: int) -> Target:
    return Target(built(window), make_tokenizer(), "windows")


@pytest.fixture
def target() -> Target:
    return target_of(WINDOW)


original = cache(built)  # as transformers runs it


@torch.no_grad()
def is_own(request: Request, window: int = WINDOW) -> bool:
    """Each token of the output is what the model itself chooses there."""
    logits = original(window)(torch.tensor([request.tokens]), use_cache=False).logits[0]
    return request.output == logits.argmax(-1).tolist()[request.prompt_length - 1 : -1]


def engine_of(llm: LLM) -> Engine:
    """Prompts are run in chunks."""
    llm.engine.scheduler.budget = CHUNK
    return llm.engine


def requests_of(llm: LLM, count: int, answer: int = ANSWER) -> list[Request]:
    chance, made = random.Random(0), list[Request]()
    for number in range(count):
        ids = [chance.randint(5, 127) for _ in range(PROMPT)]
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        made += llm.make_requests(ids, params, number)
    return made


def held(engine: Engine) -> int:
    return engine.scheduler.pool.count - engine.scheduler.pool.free


def finish(engine: Engine, requests: list[Request]) -> int:
    """Returns the largest number of blocks that were held."""
    engine.add(*requests)
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, held(engine))
    assert held(engine) == 0
    return most


@pytest.mark.parametrize("window", [5, WINDOW])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lookup", [False, True])
def test_blocks_of_others_are_not_read(window: int, backend: str, lookup: bool) -> None:
    """Nor are those that were freed: NaN in them changes nothing."""
    target = target_of(window)
    llm = LLM(target, lookup=lookup, nodes=8 if lookup else None, backend=BACKENDS[backend])
    engine = engine_of(llm)
    pool = engine.scheduler.pool
    pool.find = lambda _: ([], ROOT)  # type: ignore[method-assign]
    requests = requests_of(llm, 2)
    engine.add(*requests)
    while not engine.idle:
        engine.step()
        mine = {block for request in requests for block in request.blocks}
        assert len(mine) == held(engine)
        others = [block for block in range(pool.count) if block not in mine]
        for keys, values in engine.cache.layers:
            keys[others] = values[others] = float("nan")
    assert all(is_own(request, window) for request in requests)


def test_answers_hold_a_window_each(target: Target) -> None:
    """And a block at either end, whatever their length. As much cache for four answers that hold
    all of their tokens preempts some."""
    llm = LLM(target, lookup=False, max_batch=4, kv_tokens=4 * 80)
    engine, requests = engine_of(llm), requests_of(llm, 4)
    assert finish(engine, requests) <= 4 * 5
    assert [request.preempted for request in requests] == [0] * 4
    assert all(map(is_own, requests))
    engine.scheduler.window = target.max_context
    again = requests_of(llm, 4)
    assert finish(engine, again) == 20
    assert sum(request.preempted for request in again) > 0
    assert [request.tokens for request in again] == [request.tokens for request in requests]


def test_a_request_may_be_longer_than_the_cache(target: Target) -> None:
    llm = LLM(target, lookup=False, max_batch=2, kv_tokens=96)
    with refused("prompt[0]"):
        requests_of(llm, 1)  # a chunk is as large as the cache
    engine = engine_of(llm)
    requests = requests_of(llm, 3)
    assert finish(engine, requests) <= 6
    assert all(map(is_own, requests))


def test_a_prompt_is_found_that_was_run_before(target: Target) -> None:
    llm = LLM(target, lookup=False, max_batch=4, kv_tokens=4 * 96)
    engine = engine_of(llm)
    for reused in (0, 80):
        [request] = requests_of(llm, 1, answer=20)
        finish(engine, [request])
        assert request.num_cached_tokens == reused and is_own(request)
    others = requests_of(llm, 8)[1:]
    finish(engine, others)
    [request] = requests_of(llm, 1, answer=20)
    finish(engine, [request])
    assert request.num_cached_tokens == 0 and is_own(request), "others have taken its first blocks"


@pytest.mark.parametrize("seed", range(3))
def test_under_load(target: Target, seed: int) -> None:
    """Requests arrive, are preempted and cancelled at random; half of them begin alike."""
    chance = random.Random(seed)
    llm = LLM(target, nodes=8, max_batch=5, kv_tokens=176)
    engine, shared = engine_of(llm), [chance.randint(5, 127) for _ in range(60)]
    engine.scheduler.budget = 5 * 9
    arriving = list[Request]()
    for number in range(50):
        ids = [chance.randint(5, 127) for _ in range(chance.randint(1, 60))]
        params = SamplingParams(max_tokens=chance.randint(1, 60))
        arriving += llm.make_requests(shared * (number % 2) + ids, params, number)
    everyone = list(arriving)
    while arriving or not engine.idle:
        while arriving and chance.random() < 0.3:
            engine.add(arriving.pop(0))
        if engine.scheduler.running and chance.random() < 0.02:
            engine.cancel(chance.choice(engine.scheduler.running))
        engine.step()
    assert held(engine) == 0
    assert all(map(is_own, everyone))
    assert {request.finish_reason for request in everyone} >= {"length", "abort"}
    assert sum(request.preempted for request in everyone) > 0
    assert sum(request.num_cached_tokens for request in everyone) > 3 * len(shared)


def test_a_heads_layers_see_everything(target: Target) -> None:
    llm = LLM(target, make_drafter(target, "p-eagle"), k=3)
    engine, [request] = engine_of(llm), requests_of(llm, 1)
    assert finish(engine, [request]) >= (PROMPT + ANSWER) // 16
    assert is_own(request)

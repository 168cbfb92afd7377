"""Whatever arrives, everyone who fits is served, in order, and no block is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import InputError
from peagle.engine.blocks import BlockPool
from peagle.engine.request import Request, SamplingParams
from peagle.engine.scheduler import Scheduler, Work

K = 3


def request(index: int, prompt: int, output: int) -> Request:
    ids = [index % 5, *range(prompt - 1)]
    return Request(index, prompt, ids, SamplingParams(max_tokens=output))


def run(scheduler: Scheduler, work: Work, chance: random.Random) -> None:
    """What the engine does with a work: some of the draft stands, and K tokens are drafted."""
    request = work.request
    assert 0 < work.tokens <= len(request.pending)
    needed = request.computed + work.tokens + scheduler.reach
    assert len(request.blocks) * scheduler.pool.size >= needed
    if not work.complete:
        assert not request.draft
        request.computed += work.tokens
    else:
        room = request.params.max_tokens - len(request.output)
        said = min(chance.randint(0, len(request.draft)) + 1, room)
        request.tokens += [chance.randint(0, 3) for _ in range(said)]
        request.computed = len(request.tokens) - 1
        request.draft = [0] * chance.randint(0, K)
        if len(request.output) == request.params.max_tokens:
            request.finish_reason = "length"
    if chance.random() < 0.5:  # else the drafter falls behind
        new = scheduler.undrafted(request, chance.randint(1, 30))
        assert request.slots == new.start < new.stop <= request.computed
        scheduler.drafted(request, new.stop)
    scheduler.advance(request)
    if request.finish_reason:
        scheduler.remove(request)


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=14),
    blocks=st.integers(9, 40),
    batch=st.integers(1, 5),
    extra=st.integers(0, 20),
    seed=st.integers(0, 999),
)
def test_everyone_is_served(
    sizes: list[tuple[int, int]], blocks: int, batch: int, extra: int, seed: int
) -> None:
    pool, chance = BlockPool(blocks, 8), random.Random(seed)
    scheduler = Scheduler(pool, batch, batch * (K + 1) + extra, reach=K)
    arriving = [request(i, *size) for i, size in enumerate(sizes)]
    everyone, admitted, rounds = list(arriving), list[int](), 0
    while arriving or scheduler.running or scheduler.waiting:
        while arriving and chance.random() < 0.5:
            scheduler.check(arriving[0])
            scheduler.add(arriving.pop(0))
        if scheduler.running and chance.random() < 0.05:
            victim = chance.choice(scheduler.running)
            victim.finish_reason = "abort"
            scheduler.remove(victim)
            assert not victim.blocks
        works = scheduler.schedule()
        assert works or not scheduler.running, "a round does something"
        assert len({id(work.request) for work in works}) == len(works)
        assert sum(work.tokens for work in works) <= scheduler.budget
        assert len(scheduler.running) <= batch
        decoding = {id(r) for r in scheduler.running if r.draft or r.output and not r.preempted}
        assert decoding <= {id(work.request) for work in works}, "who decodes runs in every round"
        admitted += [r.index for r in scheduler.running if r.index not in admitted]
        served = [r.index in admitted for r in scheduler.waiting]
        assert served == sorted(served, reverse=True), "who gave up blocks is the next to get some"
        for work in works:
            run(scheduler, work, chance)
        rounds += 1
        assert rounds < 4000, "and so it ends"
    assert pool.free == pool.count
    assert admitted == sorted(admitted), "first come, first served"
    assert all(r.finish_reason for r in everyone)


def test_prompts_are_run_in_chunks_beside_those_that_decode() -> None:
    scheduler = Scheduler(BlockPool(40, 4), 3, 12, reach=K)
    first, second = request(0, 5, 9), request(1, 30, 9)
    scheduler.add(first)
    scheduler.add(second)
    assert [w.tokens for w in scheduler.schedule()] == [5, 7]
    first.tokens.append(1)
    first.computed, first.draft, second.computed = 5, [1, 2], 7
    works = scheduler.schedule()
    assert [(w.request.index, w.tokens, w.complete) for w in works] == [(0, 3, True), (1, 9, False)]


def test_the_newest_gives_up_its_blocks() -> None:
    scheduler = Scheduler(BlockPool(6, 4), 2, 64, reach=K)
    old, new = request(0, 8, 12), request(1, 8, 9)
    for one in (old, new):
        scheduler.add(one)
    assert len(scheduler.schedule()) == 2 and scheduler.pool.free == 0
    for one in (old, new):
        one.tokens.append(1)
        one.computed, one.draft = 8, [1, 2, 3]
    assert [work.request for work in scheduler.schedule()] == [old]
    assert (new.preempted, new.blocks, new.draft, new.computed) == (1, [], [], 0)
    assert list(scheduler.waiting) == [new]


def test_a_prompt_that_others_had_is_found() -> None:
    scheduler = Scheduler(BlockPool(20, 4), 2, 64, reach=K)
    first, again = request(0, 14, 2), request(5, 14, 2)
    scheduler.add(first)
    [work] = scheduler.schedule()
    first.tokens.append(3)
    first.computed = 14
    scheduler.drafted(first, 9)
    scheduler.advance(first)
    scheduler.remove(first)
    scheduler.add(again)
    [work] = scheduler.schedule()
    assert (again.reused, work.tokens) == (12, 2)
    assert again.slots == 8, "the drafter has not run all of the third block"


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 2, 64, reach=K)
    scheduler.check(request(0, 8, 5))
    with pytest.raises(InputError, match="prompt 3 needs 17 tokens of KV cache .* all of it is 16"):
        scheduler.check(request(3, 8, 6))

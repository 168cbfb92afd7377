"""Whatever arrives, everyone who fits is served, in order, and no block is lost."""

import random
from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tiny import chain

from peagle.engine.blocks import BlockPool
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.engine.scheduler import ScheduledRequest, Scheduler

K = 3


def request(index: int, prompt: int, output: int) -> Request:
    ids = [index % 5, *range(prompt - 1)]
    sampler = text = Mock()  # the scheduler reads neither
    return Request(index, prompt, ids, SamplingParams(max_tokens=output), sampler, text)


def run(scheduler: Scheduler, item: ScheduledRequest, chance: random.Random) -> None:
    """Run an item as the engine does: accept a part of the draft, then draft K tokens."""
    request = item.request
    assert 0 < item.num_tokens <= len(request.pending)
    needed = request.num_computed_tokens + item.num_tokens + scheduler.num_lookahead_tokens
    assert len(request.blocks) * scheduler.pool.size >= needed
    if not item.complete:
        assert not request.draft
        request.num_computed_tokens += item.num_tokens
    else:
        room = request.params.max_tokens - len(request.output)
        said = min(chance.randint(0, len(request.draft)) + 1, room)
        request.tokens += [chance.randint(0, 3) for _ in range(said)]
        request.num_computed_tokens = len(request.tokens) - 1
        request.draft = chain([0] * chance.randint(0, K))
        if len(request.output) == request.params.max_tokens:
            request.finish_reason = "length"
    if chance.random() < 0.5:  # else the drafter falls behind
        new = scheduler.undrafted(request, chance.randint(1, 30))
        assert request.num_drafter_slots == new.start < new.stop <= request.num_computed_tokens
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
    scheduler = Scheduler(pool, batch, batch * (K + 1) + extra, num_lookahead_tokens=K)
    arriving = [request(i, *size) for i, size in enumerate(sizes)]
    everyone, admitted, rounds = list(arriving), list[int](), 0
    while arriving or scheduler.running or scheduler.waiting:
        while arriving and chance.random() < 0.5:
            scheduler.add(arriving.pop(0))
        if scheduler.running and chance.random() < 0.05:
            victim = chance.choice(scheduler.running)
            victim.finish_reason = "abort"
            scheduler.remove(victim)
            assert not victim.blocks
        scheduled = scheduler.schedule()
        assert scheduled or not scheduler.running, "a round does something"
        assert len({id(item.request) for item in scheduled}) == len(scheduled)
        assert sum(item.num_tokens for item in scheduled) <= scheduler.budget
        assert len(scheduler.running) <= batch
        decoding = {id(r) for r in scheduler.running if r.draft or r.output and not r.preempted}
        assert decoding <= {id(item.request) for item in scheduled}, (
            "who decodes runs in every round"
        )
        admitted += [r.index for r in scheduler.running if r.index not in admitted]
        served = [r.index in admitted for r in scheduler.waiting]
        assert served == sorted(served, reverse=True), "who gave up blocks is the next to get some"
        for item in scheduled:
            run(scheduler, item, chance)
        rounds += 1
        assert rounds < 4000, "and so it ends"
    assert pool.free == pool.count
    assert admitted == sorted(admitted), "first come, first served"
    assert all(r.finish_reason for r in everyone)


def test_prompts_are_run_in_chunks_beside_those_that_decode() -> None:
    scheduler = Scheduler(BlockPool(40, 4), 3, 12, num_lookahead_tokens=K)
    first, second = request(0, 5, 9), request(1, 30, 9)
    scheduler.add(first)
    scheduler.add(second)
    assert [item.num_tokens for item in scheduler.schedule()] == [5, 7]
    first.tokens.append(1)
    first.num_computed_tokens, second.num_computed_tokens = 5, 7
    first.draft = chain([1, 2])
    scheduled = scheduler.schedule()
    found = [
        (item.request.index, item.num_tokens, item.complete, item.decoding) for item in scheduled
    ]
    assert found == [(0, 3, True, True), (1, 9, False, False)]


def test_the_newest_gives_up_its_blocks() -> None:
    scheduler = Scheduler(BlockPool(6, 4), 2, 64, num_lookahead_tokens=K)
    old, new = request(0, 8, 12), request(1, 8, 9)
    for one in (old, new):
        scheduler.add(one)
    assert len(scheduler.schedule()) == 2 and scheduler.pool.free == 0
    for one in (old, new):
        one.tokens.append(1)
        one.num_computed_tokens, one.draft = 8, chain([1, 2, 3])
    assert [item.request for item in scheduler.schedule()] == [old]
    assert (new.preempted, new.blocks, len(new.draft), new.num_computed_tokens) == (1, [], 0, 0)
    assert list(scheduler.waiting) == [new]


def test_a_prompt_that_others_had_is_found() -> None:
    scheduler = Scheduler(BlockPool(20, 4), 2, 64, num_lookahead_tokens=K)
    first, again = request(0, 14, 2), request(5, 14, 2)
    scheduler.add(first)
    [item] = scheduler.schedule()
    first.tokens.append(3)
    first.num_computed_tokens = 14
    scheduler.drafted(first, 9)
    scheduler.advance(first)
    scheduler.remove(first)
    scheduler.add(again)
    [item] = scheduler.schedule()
    assert (again.reused, item.num_tokens) == (12, 2)
    assert again.num_drafter_slots == 8, "the drafter has not run all of the third block"


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 2, 64, num_lookahead_tokens=K)
    scheduler.check(8 + 5, 0)
    with refused("prompt[3]"):
        scheduler.check(8 + 6, 3)

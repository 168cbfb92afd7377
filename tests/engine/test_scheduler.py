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
ALL = 1 << 30  # a window of all positions


def request(index: int, prompt: int, output: int) -> Request:
    ids = [index % 5, *range(prompt - 1)]
    sampler = text = Mock()  # the scheduler reads neither
    return Request(index, prompt, ids, SamplingParams(max_tokens=output), sampler, text)


def added(scheduler: Scheduler, *requests: Request) -> Scheduler:
    for one in requests:
        scheduler.add(one)
    return scheduler


def run(scheduler: Scheduler, item: ScheduledRequest, chance: random.Random) -> None:
    """Run an item as the engine does: accept a part of the draft, then draft K tokens."""
    request = item.request
    held = len(request.blocks) - request.num_freed_blocks
    assert held <= scheduler.max_blocks(ALL)
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
        before = request.num_drafter_slots
        new = scheduler.take_drafter_slots(request, chance.randint(1, 30))
        assert before <= new.start < new.stop <= request.num_computed_tokens
        assert request.num_drafter_slots == new.stop
    scheduler.advance(request)
    if request.finish_reason:
        scheduler.remove(request)


def test_who_is_alone_gives_up_its_draft_and_not_its_blocks() -> None:
    """At its end there is room for its tokens, and none for a draft's keys as well."""
    scheduler = Scheduler(BlockPool(4, 16), 1, 512, 7, ALL)
    alone = added(scheduler, request(0, 10, 47)).waiting[0]
    while len(alone.output) < 46:
        [item] = scheduler.schedule()
        alone.num_computed_tokens = len(alone.tokens)
        alone.tokens.append(1)
        alone.draft = chain([0] * 7)
        scheduler.advance(alone)
    assert not alone.preempted


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=14),
    blocks=st.integers(0, 31),
    batch=st.integers(1, 5),
    budget=st.integers(20, 40),
    window=st.sampled_from([ALL, 1, 7, 16, 30]),
    seed=st.integers(0, 999),
)
def test_everyone_is_served(
    sizes: list[tuple[int, int]], blocks: int, batch: int, budget: int, window: int, seed: int
) -> None:
    needed = Scheduler(BlockPool(1, 8), batch, budget, K, window).max_blocks(65)
    pool, chance = BlockPool(needed + blocks, 8), random.Random(seed)
    scheduler = Scheduler(pool, batch, budget, K, window)
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
        assert decoding <= {id(item.request) for item in scheduled}, "who decodes runs each round"
        admitted += [r.index for r in scheduler.running if r.index not in admitted]
        served = [r.index in admitted for r in scheduler.waiting]
        assert served == sorted(served, reverse=True), "who gave up blocks is the next to get some"
        for item in scheduled:
            run(scheduler, item, chance)
        held = [block for r in scheduler.running for block in r.blocks[r.num_freed_blocks :]]
        assert pool.free == pool.count - len(set(held))
        assert all(
            r.num_freed_blocks == max(0, r.num_computed_tokens - max(window, 8)) // 8
            for r in scheduler.running
        )
        rounds += 1
        assert rounds < 4000, "and so it ends"
    assert pool.free == pool.count
    assert admitted == sorted(admitted), "first come, first served"
    assert all(r.finish_reason for r in everyone)


def test_prompts_are_run_in_chunks_beside_those_that_decode() -> None:
    first, second = request(0, 5, 9), request(1, 30, 9)
    scheduler = added(Scheduler(BlockPool(40, 4), 3, 12, K, ALL), first, second)
    assert [item.num_tokens for item in scheduler.schedule()] == [5, 7]
    first.tokens.append(1)
    first.num_computed_tokens, second.num_computed_tokens = 5, 7
    first.draft = chain([1, 2])
    scheduled = scheduler.schedule()
    found = [(it.request.index, it.num_tokens, it.complete, it.decoding) for it in scheduled]
    assert found == [(0, 3, True, True), (1, 9, False, False)]


def test_prompts_are_run_in_smaller_chunks_while_requests_decode() -> None:
    first, second = request(0, 30, 9), request(1, 30, 9)
    scheduler = added(Scheduler(BlockPool(40, 4), 3, 12, K, ALL, mixed_chunk=2), first, second)
    assert [item.num_tokens for item in scheduler.schedule()] == [12], "none decodes"
    first.tokens.append(1)
    first.num_computed_tokens = 30
    found = [(item.request.index, item.num_tokens) for item in scheduler.schedule()]
    assert found == [(0, 1), (1, 2)]


def test_a_long_prompt_delays_no_request_that_decodes() -> None:
    """They run in every round, all of their drafts; the prompt gets the rest of each."""
    budget, count = 20, 3
    decoding = [request(number, 1, 99) for number in range(count)]
    scheduler = added(Scheduler(BlockPool(200, 4), count + 1, budget, K, ALL), *decoding)
    rounds, prompt = 0, request(count, 150, 9)
    while not prompt.output:
        scheduled = {item.request.index: item for item in scheduler.schedule()}
        assert list(scheduled)[:count] == list(range(count)), "first those that decode"
        assert all(item.complete for item in scheduled.values() if item.request is not prompt)
        if rounds:
            left = len(prompt.tokens) - prompt.num_computed_tokens
            assert scheduled[count].num_tokens == min(left, budget - count * (1 + rounds % K))
        else:
            scheduler.add(prompt)
        rounds += 1
        for item in scheduled.values():
            one, complete = item.request, item.complete
            one.num_computed_tokens += item.num_tokens - len(one.draft)
            if complete:  # none of its draft is accepted
                one.tokens.append(1)
                one.draft = chain([0] * (rounds % K))
            scheduler.advance(one)
    assert all(len(one.output) == rounds for one in decoding)
    assert rounds == 1 + 11


def test_the_newest_gives_up_its_blocks() -> None:
    old, new = request(0, 8, 12), request(1, 8, 9)
    scheduler = added(Scheduler(BlockPool(6, 4), 2, 64, K, ALL), old, new)
    assert len(scheduler.schedule()) == 2 and scheduler.pool.free == 0
    for one in (old, new):
        one.tokens.append(1)
        one.num_computed_tokens, one.draft = 8, chain([1, 2, 3])
    assert [item.request for item in scheduler.schedule()] == [old]
    assert (new.preempted, new.blocks, len(new.draft), new.num_computed_tokens) == (1, [], 0, 0)
    assert list(scheduler.waiting) == [new]


def test_a_prompt_that_others_had_is_found() -> None:
    first, again = request(0, 14, 2), request(5, 14, 2)
    scheduler = added(Scheduler(BlockPool(20, 4), 2, 64, K, ALL), first)
    [item] = scheduler.schedule()
    first.tokens.append(3)
    first.num_computed_tokens = 14
    scheduler.take_drafter_slots(first, 9)
    scheduler.advance(first)
    scheduler.remove(first)
    scheduler.add(again)
    [item] = scheduler.schedule()
    assert (again.num_cached_tokens, item.num_tokens) == (12, 2)
    assert again.num_drafter_slots == 8, "the drafter has not run all of the third block"


def test_blocks_before_the_window_are_freed() -> None:
    first, again = request(0, 30, 9), request(5, 30, 9)
    scheduler = added(Scheduler(BlockPool(20, 4), 1, 8, K, 6), first)
    freed, most = list[int](), 0
    for _ in range(4):
        [item] = scheduler.schedule()
        most = max(most, 20 - scheduler.pool.free)
        first.num_computed_tokens += item.num_tokens
        scheduler.advance(first)
        freed.append(first.num_freed_blocks)
    assert freed == [0, 2, 4, 6] and set(first.blocks[:6]) == {first.blocks[6]}
    assert most == 5 == -(-(6 - 2 + 8 + K) // 4) + 1 < scheduler.max_blocks(30) + 1
    scheduler.remove(first)
    assert scheduler.pool.free == 20
    scheduler.add(again)
    [item] = scheduler.schedule()
    assert (again.num_cached_tokens, item.num_tokens) == (28, 2), "its blocks were free"
    assert again.num_freed_blocks == 5
    again.finish_reason = "abort"
    scheduler.remove(again)
    assert scheduler.pool.free == 20 and not again.num_freed_blocks


def test_a_long_request_fits_where_its_window_does() -> None:
    few = Scheduler(BlockPool(5, 4), 1, 4, K, 6)
    few.check(1000, 0)
    assert few.max_blocks(1000) == few.max_blocks(15) == 5
    with refused("prompt[0]"):
        Scheduler(BlockPool(4, 4), 1, 4, K, 6).check(14, 0)


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 2, 64, K, ALL)
    scheduler.check(8 + 5, 0)
    with refused("prompt[3]"):
        scheduler.check(8 + 6, 3)

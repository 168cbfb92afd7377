"""The budget on a simulated machine, which slows down for seconds at a time: at no load is it
slower than no drafts, and where drafts pay it is faster. What it sees is disturbed, what counts
is not."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp
from statistics import median

import pytest

from peagle.engine.adaptive import AdaptiveBudget
from peagle.engine.budget import Ask
from peagle.engine.costs import PROMPT_ROWS, Curve, measure, row_counts
from peagle.engine.engine import CHUNK
from peagle.engine.tree import Candidate, Draft, along, grow
from peagle.methods.p_eagle import PEagle

K, PROMPT_TOKENS = 7, 125
# Seconds as found for SmolLM2-135M and its P-EAGLE head on two cores of a Xeon.
VERIFY = Curve({1: 0.0195, 4: 0.0245, 8: 0.0275, 12: 0.029, 16: 0.033, 20: 0.0374, 24: 0.042,
                40: 0.06, 80: 0.1, 128: 0.14, 512: 0.5})  # fmt: skip
DRAFT = Curve({1: 0.0045, 10: 0.006, 24: 0.008, 72: 0.016, 124: 0.021, 256: 0.042, 512: 0.08})


@dataclass
class Running:
    answer: int
    left: int = PROMPT_TOKENS  # of what the target has to run
    num_computed_tokens: int = 0
    emitted: int = 0
    num_drafter_slots: int = 0
    draft: Draft = field(default_factory=Draft)


def disturbed(chance: random.Random) -> Callable[[float], float]:
    """A clock with disturbances: it maps seconds of work to the seconds measured."""
    now, until, slow = 0.0, 0.0, 1.0

    def seconds(work: float) -> float:
        nonlocal now, until, slow
        if now >= until:
            slow = chance.choice([1, 1, 1, 1.15, 1.3, 1.6])
            until = now + chance.expovariate(1 / 1.5)
        shown = work * slow * exp(chance.gauss(0, 0.05))
        if chance.random() < 0.03:
            shown *= chance.uniform(1.5, 4)
        now += shown
        return shown

    return seconds


def confidences(chance: random.Random) -> list[float]:
    """Confidences of a draft: 1.6 tokens a round at two draft tokens."""
    base = chance.betavariate(0.6, 0.9)
    return [min(0.999, max(0.01, base * 0.85**d + chance.gauss(0, 0.08))) for d in range(K)]


def run(request: Running, tokens: int, budget: AdaptiveBudget, chance: random.Random) -> None:
    """A request's part of a forward of the target."""
    request.left -= tokens
    request.num_computed_tokens += tokens
    if not request.left:
        hits = [chance.random() < p for p in request.draft.probs] + [False]
        budget.calibration.count(request.draft, range(1, hits.index(False) + 1))
        request.emitted += hits.index(False) + 1
        request.num_computed_tokens = PROMPT_TOKENS + request.emitted - 1
        request.left, request.draft = 1, Draft()


def serve(  # noqa: C901 (a whole engine)
    concurrency: int, requests: int, answer: int, seed: int, *, drafts: bool
) -> float:
    """Undisturbed seconds of all requests, the engine's rounds as they are."""
    chance, clock = random.Random(seed), disturbed(random.Random(seed + 1000))
    max_rows = concurrency * (K + 1)
    budget = AdaptiveBudget(
        PEagle().passes,
        K,
        measure(lambda rows: clock(VERIFY(rows)), row_counts(max_rows)),
        measure(lambda rows: clock(DRAFT(rows)), row_counts(max_rows, PROMPT_ROWS)),
    )
    waiting, running, spent = [Running(answer) for _ in range(requests)], list[Running](), 0.0
    while waiting or running:
        running += [waiting.pop(0) for _ in waiting[: concurrency - len(running)]]
        decoding, room, works = True, CHUNK, list[tuple[Running, int]]()
        for request in sorted(running, key=lambda r: not r.emitted):
            if tokens := min(room, request.left):
                works.append((request, tokens))
                room, decoding = room - tokens, decoding and request.emitted > 0
        rows = sum(tokens for _, tokens in works)
        spent, shown = spent + VERIFY(rows), clock(VERIFY(rows))
        for request, tokens in works:
            run(request, tokens, budget, chance)
        running = [r for r in running if r.emitted < answer]
        if decoding:
            budget.verify.observe([rows], shown)
        going = [r for r, _ in works if r.emitted < answer]
        if not going or not drafts:
            continue
        asks = [
            Ask(r.num_computed_tokens - r.num_drafter_slots, answer - r.emitted - 1) for r in going
        ]
        load = min(concurrency, len(running) + len(waiting))
        slots, drafted = 0, list[Running]()
        for request, depth in zip(going, budget.choose(load, asks, []), strict=True):
            if depth:
                slots += request.num_computed_tokens - request.num_drafter_slots
                request.num_drafter_slots = request.num_computed_tokens
                if request.emitted:
                    slots += depth - 1
                    nodes = enumerate(confidences(chance)[:depth])
                    chances = [Candidate(0, p, budget.calibration(at, p)) for at, p in nodes]
                    request.draft = grow(along(chances), depth)
                    drafted.append(request)
        kept = budget.keep(load, [r.draft for r in drafted], float(DRAFT(slots)) if slots else 0.0)
        for request, count in zip(drafted, kept, strict=True):
            request.draft = request.draft.first(count)
            request.left = 1 + count
        if slots:
            spent, shown = spent + DRAFT(slots), clock(DRAFT(slots))
            if decoding:
                budget.draft.observe([slots], shown)
    return spent


@pytest.mark.parametrize(("concurrency", "answer", "wanted"), [
    (1, 32, 1.08), (1, 256, 1.15), (4, 32, 0.98), (4, 256, 1.03),
    (8, 32, 0.98), (8, 256, 0.98), (16, 32, 0.98), (16, 256, 0.98),
])  # fmt: skip
def test_drafting_never_costs(concurrency: int, answer: int, wanted: float) -> None:
    """Nor does finding out whether it pays."""
    requests = max(8, 2 * concurrency)
    alone = serve(concurrency, requests, answer, 0, drafts=False)
    ratios = [alone / serve(concurrency, requests, answer, seed, drafts=True) for seed in range(15)]
    assert median(ratios) >= wanted
    assert sorted(ratios)[1] >= 0.95

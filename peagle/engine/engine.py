"""The loop: schedule → verify → accept → draft, over all requests at once.

A round runs one target forward over the drafts to verify and chunks of prompts, and one drafter
step over the slots newly verified. Nothing else touches the models.

Shapes: T rows of the target's forward, R rows whose logits are needed, V vocabulary.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.backends.batch import BLOCK, Batch, Span, blocks_of, slots_of
from peagle.backends.kv_cache import KVCache
from peagle.engine.accept import accept
from peagle.engine.blocks import BlockPool
from peagle.engine.budget import Ask, Budget, Round
from peagle.engine.draft import Proposer
from peagle.engine.lookup import LookupCalibration, with_lookup
from peagle.engine.params import GrammarTooComplex
from peagle.engine.request import Chunk, FinishReason, Request
from peagle.engine.sampling import Choice, greedy
from peagle.engine.scheduler import ScheduledRequest, Scheduler
from peagle.engine.tree import Draft, Match, Offer, along, grow
from peagle.methods.base import NewSlots
from peagle.model.base_target import BaseTarget, TargetOutput

if TYPE_CHECKING:
    from peagle.backends.base import TargetModel

CHUNK = 2048  # tokens of a round while prompts wait, unless the rows of all drafts are more

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine."""

    max_batch: int  # requests that run together
    kv_tokens: int  # tokens of KV cache, for all requests
    mixed_chunk: int  # tokens of prompts in a round in which requests decode
    k: int  # maximum draft depth; 0 without a drafter
    nodes: int | None = None  # maximum size of a request's draft tree; None: a chain of k tokens
    lookup: bool = False  # lookup drafts, too; needs nodes


class Engine:
    """Requests come in by `add`; every `step` takes all that run one round further. Any thread may
    call these methods: one round runs at a time."""

    def __init__(
        self,
        target: BaseTarget,
        model: "TargetModel",
        settings: Settings,
        budget: Budget,
        proposer: Proposer | None,  # None: the target decodes alone
    ) -> None:
        self.target = target
        self.model = model
        self.settings = settings
        self.proposer = proposer
        self.budget = budget
        self.size = settings.nodes or settings.k  # maximum number of nodes of a draft
        self.lookups = LookupCalibration()
        self.taps = () if proposer is None else proposer.model.drafter.config.feature_layers
        pool = BlockPool(blocks_of(settings.kv_tokens), BLOCK)
        batch = settings.max_batch
        lookahead = max(settings.k, settings.nodes or 0)  # slots of placeholders, or of nodes
        rows = max(CHUNK, batch * (lookahead + 1))
        window = target.window if proposer is None else target.max_context  # a drafter sees all
        self.scheduler = Scheduler(pool, batch, rows, lookahead, window, settings.mixed_chunk)
        self.cache = KVCache(pool.count, target.kv_shapes, target.dtype, target.device)
        self.lock = threading.RLock()
        self._in_round = False  # the lock is reentrant: a finalizer may cancel inside a round
        self._cancelled = list[tuple[Request, FinishReason]]()  # during a round
        self.last_depth = 0  # largest depth that the budget chose in the last round
        self._ends = target.end_tokens

    def add(self, *requests: Request) -> None:
        """Queue requests that `LLM.make_requests` made."""
        with self.lock:
            for request in requests:
                self.scheduler.add(request)

    def cancel(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request as it is, after the round that runs, and free its blocks."""
        with self.lock:
            if self._in_round:
                self._cancelled.append((request, reason))
            elif request.finish_reason is None:
                request.finish_reason = reason
                if text := request.text.finish():
                    request.emitted.append(Chunk(request.index, text, 0, "target"))
                self.scheduler.remove(request)

    def fetch(self, *requests: Request) -> list[Chunk]:
        """The chunks that some requests have emitted since the last call."""
        chunks = list[Chunk]()
        with self.lock:
            for request in requests:
                chunks += request.emitted
                request.emitted.clear()
        return chunks

    @property
    def idle(self) -> bool:
        """No request runs or waits."""
        return not self.scheduler.running and not self.scheduler.waiting

    def step(self) -> None:
        """One round. Requests that end get a `finish_reason`; `fetch` returns what was emitted."""
        with self.lock, self._round():
            began = perf_counter()
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return
            verifying = perf_counter()
            out = self.verify(scheduled)
            self.accept(scheduled, out)
            drafting = perf_counter()
            drafter_rows = self.draft(scheduled)
            releasing = perf_counter()
            self.release(scheduled)
            if all(item.decoding for item in scheduled):
                overhead = verifying - began + perf_counter() - releasing
                seconds = drafting - verifying, releasing - drafting, overhead
                self.budget.learn(Round(len(out.hidden), drafter_rows, *seconds))

    @contextmanager
    def _round(self) -> Iterator[None]:
        """Defer cancellations made during the round: the garbage collector may close a stream at
        any time. Native code may take threads from torch where other processes use the cores."""
        self._in_round = True
        threads = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            self._in_round = False
            while self._cancelled:
                self.cancel(*self._cancelled.pop())

    @torch.no_grad()
    def verify(self, scheduled: list[ScheduledRequest]) -> TargetOutput:
        """Run the scheduled tokens through the target; keep their features for the drafter."""
        spans = list[Span]()
        for request, count, draft in scheduled:
            tails = [] if draft.is_chain else draft.tails()
            ids = request.pending[:count]
            spans.append(Span(request.blocks, request.num_computed_tokens, ids, tails))
        batch = Batch.of(spans)
        out = self.model.forward(batch, self.cache, self.taps)
        if self.proposer is not None:
            self.proposer.features.write(batch.slot_mapping, out.features)
        return out

    @torch.no_grad()
    def accept(self, scheduled: list[ScheduledRequest], out: TargetOutput) -> None:
        """Accept the draft tokens that the target agrees with, and emit them and its next token.
        Accepted cache slots move to their final positions."""
        deciding = [item for item in scheduled if item.complete]
        rows = list[int]()  # rows of newest tokens and their drafts
        end = 0
        for item in scheduled:
            end += item.num_tokens
            if item.complete:
                rows += range(end - 1 - len(item.draft), end)
            else:
                item.request.num_computed_tokens += item.num_tokens
        if not deciding:
            return
        requests = [item.request for item in deciding]
        largest = all(each.sampler.plain and each.params.logprobs is None for each in requests)
        logits = self.model.logits(out.hidden[rows], largest=largest)
        best = greedy(logits)
        moves = list[tuple[int, int]]()
        first = 0
        for item in deciding:
            last = first + 1 + len(item.draft)
            choice = Choice(best.tokens[first:last], best.finite[first:last])
            moves += self._accept(item.request, logits[first:last], choice)
            first = last
        if moves:
            sources, slots = map(list, zip(*moves, strict=True))
            self.cache.move(sources, slots)
            if self.proposer is not None:
                self.proposer.features.move(sources, slots)

    def _accept(self, request: Request, logits: Tensor, best: Choice) -> list[tuple[int, int]]:
        """Accept a request's draft, by its logits (R, V) and their argmax; returns the moves of
        cache slots, from and to."""
        start = request.num_computed_tokens
        draft = request.draft
        try:
            path = accept(request, logits, best, self._ends)
        except Exception as failure:  # its sampler, grammar or text failed: the others go on
            log.warning("request %s: %r", request.index, failure)
            request.finish_reason = "error"
            request.failure = str(failure) or type(failure).__name__
            request.grammar_failed = isinstance(failure, GrammarTooComplex)
            return []
        if draft:
            self.budget.calibration.count(draft, path)
            self.lookups.count(draft, path)
        kept = slots_of(request.blocks, start, 1 + len(draft))
        return [(kept[row], kept[depth]) for depth, row in enumerate(path, start=1) if row != depth]

    @torch.no_grad()
    def draft(self, scheduled: list[ScheduledRequest]) -> list[float]:
        """Propose the next tokens of requests that go on: look up, run the drafter, grow a tree of
        both, keep what the budget allows. Returns the rows of the drafter's forwards."""
        going = [item.request for item in scheduled if item.request.finish_reason is None]
        if not going or not self.size:
            return []
        began = perf_counter()
        load = self.scheduler.load
        matches = [self._look_up(request) for request in going]
        new = self._new_slots(going, matches)
        offers = self._propose(going, new)
        min_chance = self.budget.min_chance(load, perf_counter() - began)
        drafts = list[Draft]()
        for at, match in enumerate(matches):
            offer = with_lookup(offers.get(at, along([])), match, self.lookups)
            drafts.append(grow(offer, self.size, match, min_chance))
        counts = self.budget.keep(load, drafts, perf_counter() - began)
        for request, draft, count in zip(going, drafts, counts, strict=True):
            request.draft = draft.first(count)
        return self.proposer.rows(list(new.values())) if self.proposer and new else []

    def _look_up(self, request: Request) -> Match:
        """The tokens that followed a request's newest ones before, as far as its grammar allows
        them; none while its prompt runs: the next chunk may end inside a draft."""
        if not self.settings.lookup or request.num_pending > 1:
            return Match()
        match = request.seen.find(request.tokens, max(0, min(request.left, self.size)))
        if request.sampler.matcher is None:
            return match
        allowed = request.sampler.matcher.count_allowed(match.tokens)
        return match._replace(tokens=match.tokens[:allowed])

    def _new_slots(self, going: list[Request], matches: list[Match]) -> dict[int, NewSlots]:
        """Slots for the drafter to run, by index of the request. While nothing is drafted for a
        request, its slots are missed. Once drafting pays, the drafter runs them, at most a round's
        budget in a round."""
        new = dict[int, NewSlots]()
        if self.proposer is None:
            return new
        room = self.scheduler.budget
        for at, depth in enumerate(self._depths(going, matches)):
            if not depth or not room:
                continue
            request = going[at]
            slots = self.scheduler.take_drafter_slots(request, room)
            ids = request.tokens[slots.start + 1 : slots.stop + 1]
            to_draft = depth if slots.stop == len(request.tokens) - 1 else 0
            new[at] = NewSlots(request.blocks, slots.start, ids, to_draft)
            room -= len(slots)
        return new

    def _depths(self, requests: list[Request], matches: list[Match]) -> list[int]:
        """The draft depth of each request."""
        missed = [r.num_computed_tokens - r.num_drafter_slots for r in requests]
        both = zip(missed, requests, strict=True)
        asks = [Ask(slots, r.left, r.num_pending == 1) for slots, r in both]
        found = [chance for match in matches for chance in self.lookups.along(match)]
        depths = self.budget.choose(self.scheduler.load, asks, found)
        self.last_depth = max(depths)
        rooms = [max(0, self.target.max_context - len(request.tokens)) for request in requests]
        return list(map(min, depths, rooms))

    def _propose(self, going: list[Request], new: dict[int, NewSlots]) -> dict[int, Offer]:
        """The drafter's offers, by index of the request: the method runs the new slots and yields
        states, and these are scored (draft.py)."""
        if self.proposer is None or not new:
            return {}
        matchers = [going[at].sampler.matcher for at in new]
        chance = self.budget.calibration
        offers = self.proposer.propose(list(new.values()), matchers, self.settings.nodes, chance)
        return dict(zip(new, offers, strict=True))

    def release(self, scheduled: list[ScheduledRequest]) -> None:
        """Let full blocks be found by their content; free those of requests that have ended."""
        for request, _, _ in scheduled:
            if request.finish_reason != "error":  # its keys may be NaN
                self.scheduler.advance(request)
            if request.finish_reason is not None:
                self.scheduler.remove(request)

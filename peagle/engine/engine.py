"""The loop: schedule → verify → accept → draft, over all requests at once.

A round runs one packed target forward over drafts to verify and chunks of prompts, and one packed
drafter step over the slots newly verified. Nothing else touches the models.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.blocks import BLOCK, BlockPool
from peagle.engine.depth import AdaptiveDepth, Ask
from peagle.engine.draft import NewSlots, passes, propose
from peagle.engine.features import FeatureCache
from peagle.engine.forward import forward
from peagle.engine.grammar import Grammars
from peagle.engine.kv_cache import KVCache, Span
from peagle.engine.request import Chunk, FinishReason, Request, RequestFailure, TokenLogprob
from peagle.engine.sampling import NOT_A_NUMBER, Sampler, accept_prefix
from peagle.engine.scheduler import Scheduler, Work
from peagle.engine.text import TextStream, end_tokens
from peagle.model.attend import ROW_TILE
from peagle.model.drafter import Drafter
from peagle.model.target import Target, TargetOutput


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine runs."""

    max_batch: int  # requests that run together
    kv_tokens: int  # of KV cache, for all of them
    k: int  # draft tokens a round, at most where depths are adaptive; 0 without a drafter
    chunk: int = 512  # tokens of a round while prompts wait
    deterministic: bool = False


class Engine:
    """Requests come in by `add`; every `step` takes all that run one round further."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: Settings,
        grammars: Grammars,
        depths: AdaptiveDepth | None = None,  # None: k
    ) -> None:
        self.target, self.drafter, self.settings, self.depths = target, drafter, settings, depths
        pool = BlockPool(-(-settings.kv_tokens // BLOCK), BLOCK)
        budget = max(settings.chunk, settings.max_batch * (settings.k + 1))
        self.scheduler = Scheduler(pool, settings.max_batch, budget, reach=settings.k)
        self.target_cache, self.drafter_cache = (KVCache(pool.count, BLOCK) for _ in range(2))
        self.features = FeatureCache(pool.count, BLOCK)
        self._grammars, self._ends = grammars, end_tokens(target)
        self.chosen = 0  # draft tokens that were thought to pay, at most, when last asked

    def warm_up(self) -> None:
        """Make ready what the first request with a grammar would wait for."""
        self._grammars.warm_up()

    def prepare(self, request: Request) -> None:
        """Make ready what a request needs; any thread may call it. Raises InputError when it can
        never run."""
        assert self.target.tokenizer is not None
        self.scheduler.check(request)
        params, vocabulary = request.params, len(self.target.embedding)
        matcher, generator = self._grammars.matcher(params), _generator(params.seed)
        request.sampler = Sampler(params, request.tokens, generator, vocabulary, matcher)
        request.text = TextStream(self.target.tokenizer, params.stop)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the target to itself, in this engine's mode and with its head's feature layers.
        Raises TargetInUse."""
        layers = () if self.drafter is None else self.drafter.config.feature_layers
        with self.target.lease.turn(self):
            self.target.exact(self.settings.deterministic)
            self.target.tap(layers)
            yield

    def add(self, *requests: Request) -> None:
        """Queue requests that are prepared: all, or none when this raises TargetInUse."""
        with self.target.lease.turn(self, begin=True):
            for request in requests:
                self.scheduler.add(request)

    def cancel(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request as it is; what it held is free for others."""
        if request.finish_reason is not None:
            return
        with self.target.lease.turn(self):
            request.finish_reason = reason
            if text := request.text.finish():
                request.said.append(Chunk(request.index, text, False))
            self.scheduler.remove(request)

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def step(self) -> None:
        """One round. What requests say is left in their `said`; those that end get a
        `finish_reason`. Raises TargetInUse, before anything has changed."""
        with self.turn():
            self._round()

    def _round(self) -> None:
        started = time.perf_counter()
        works = self.scheduler.schedule()
        if not works:
            return
        decoding = all(work.tokens == 1 + len(work.request.draft) for work in works)
        rows = sum(work.tokens for work in works)
        ready = time.perf_counter()
        out = self.verify(works)
        self.accept(works, out)
        judged = time.perf_counter()
        forwards = self.draft(works)
        drafted = time.perf_counter()
        self._settle(works)
        if self.depths is not None and decoding:
            self.depths.verify.observe([rows], judged - ready)
            if forwards:
                self.depths.draft.observe(forwards, drafted - judged)
            self.depths.observe_overhead(ready - started + time.perf_counter() - drafted)

    @torch.no_grad()
    def verify(self, works: list[Work]) -> TargetOutput:
        """Run the works' tokens through the target: packed in one forward, or in fixed tiles."""
        spans = _spans(works)
        tokens = [token for w in works for token in w.request.pending[: w.tokens]]
        ids = torch.tensor(tokens, device=self.target.device)
        run, cache = self.target.forward, self.target_cache
        if not self.settings.deterministic:
            return forward(run, cache, spans, ids)
        hidden, features, begin = list[Tensor](), list[Tensor](), 0
        for tile in tiles(spans, ROW_TILE):
            rows = sum(span.length for span in tile)
            out = forward(run, cache, tile, ids[begin : begin + rows], tiled=True)
            hidden.append(out.hidden.clone())  # the next tile may take its place
            if out.features is not None:
                features.append(out.features.clone())
            begin += rows
        return TargetOutput(torch.cat(hidden), torch.cat(features) if features else None)

    @torch.no_grad()
    def accept(self, works: list[Work], out: TargetOutput) -> None:
        """Keep what the target agrees with, and its next token; keep features for the drafter."""
        if out.features is not None:
            self.features.keep(_spans(works), out.features)
        judged, begin = list[int](), 0
        for work in works:
            begin += work.tokens
            if work.complete:
                judged += range(begin - 1 - len(work.request.draft), begin)
        logits = self._logits(out.hidden[judged]) if judged else out.hidden[:0]
        largest, likely = logits.max(-1) if judged else (logits, logits)
        best, finite = likely.tolist(), largest.isfinite().tolist()
        row = 0
        for work in works:
            request = work.request
            if work.complete:
                rows = slice(row, row := row + 1 + len(request.draft))
                try:
                    self._judge(request, logits[rows], best[rows], finite[rows])
                    request.computed = len(request.tokens) - 1
                except RequestFailure as failure:
                    request.finish_reason, request.failure = "error", str(failure)
            else:
                request.computed += work.tokens

    def draft(self, works: list[Work]) -> list[int]:
        """Propose the next tokens of requests that go on; returns the rows of the drafter's
        forwards. A request that nothing is drafted for is left as it is: once drafting pays, the
        drafter runs the slots it is behind, a round's budget of them in a round."""
        going = [work.request for work in works if work.request.finish_reason is None]
        if self.drafter is None or not going:
            return []
        room, slots, drafted = self.scheduler.budget, list[NewSlots](), list[Request]()
        for request, depth in zip(going, self._depths(going), strict=True):
            if not depth or not room:
                continue
            new = self.scheduler.undrafted(request, room)
            ids = request.tokens[new.start + 1 : new.stop + 1]
            features = self.features.read(Span(request.blocks, new.start, len(new)))
            deep = depth if new.stop == len(request.tokens) - 1 else 0
            matcher = request.sampler.matcher
            slots.append(NewSlots(request.blocks, new.start, ids, features, deep, matcher))
            drafted.append(request)
            self.scheduler.drafted(request, new.stop)
            room -= len(new)
        if not slots:
            return []
        drafts = propose(self.drafter, self.drafter_cache, slots)
        for request, (draft, sure) in zip(drafted, drafts, strict=True):
            keep = len(draft) if self.depths is None else self.depths.trim(sure)
            request.draft, request.sure = draft[:keep], sure[:keep]
        return passes(self.drafter, slots)

    def _depths(self, requests: list[Request]) -> list[int]:
        """Draft tokens of each; none past the context's end."""
        depths = [self.settings.k] * len(requests)
        if self.depths is not None:
            asks = [Ask(r.computed - r.slots, r.params.max_tokens - len(r.output) - 1)
                    for r in requests]  # fmt: skip
            depths = self.depths.choose(self.scheduler.load, asks)
        self.chosen, limit = max(depths), self.target.max_context
        room = [max(0, limit - len(r.tokens)) for r in requests]
        return list(map(min, depths, room))

    def _logits(self, hidden: Tensor) -> Tensor:
        """(R, V); in the deterministic mode a tile at a time."""
        if not self.settings.deterministic:
            return self.target.logits(hidden)
        return torch.cat([self.target.logits(part) for part in hidden.split(ROW_TILE)])

    def _judge(self, request: Request, logits: Tensor, best: list[int], finite: list[bool]) -> None:
        """Accept the request's draft as far as it goes, and say it."""
        draft, sampler, logprobs = request.draft, request.sampler, None
        if sampler.plain:
            accepted, token = accept_prefix(best, draft)
            if not all(finite[: accepted + 1]):
                raise RequestFailure(NOT_A_NUMBER)
        else:
            accepted, token, logprobs = sampler.verify(logits, draft)
        if draft:
            request.stats.count(len(draft), accepted)
            if self.depths is not None:
                self.depths.calibration.count(request.sure, accepted)
        before, request.draft, request.sure = len(request.tokens), [], []
        self._emit(request, [*draft[:accepted], token], accepted, logprobs)
        sampler.commit(request.tokens[before:])

    def _emit(
        self,
        request: Request,
        tokens: list[int],
        accepted: int,
        logprobs: list[TokenLogprob] | None,
    ) -> None:
        """Append tokens one by one, as plain decoding would, until one ends the request."""
        for position, token in enumerate(tokens):
            request.tokens.append(token)
            request.drafted_output.append(position < accepted)
            logprob = logprobs[position] if logprobs is not None else None
            if logprob is not None:
                request.logprobs.append(logprob)
            ended = token in request.params.stop_token_ids or (
                token in self._ends and not request.params.ignore_eos
            )
            text, stopped = ("", False) if ended else request.text.push(token)
            if ended or stopped:
                request.finish_reason = "stop"
            elif len(request.output) >= request.params.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                text += request.text.finish()
            if text or logprob is not None:
                place = position + 1 if position < accepted else 0
                request.said.append(Chunk(request.index, text, place, logprob))
            if request.finish_reason:
                break

    def _settle(self, works: list[Work]) -> None:
        """Let full blocks be found; take leave of what has ended."""
        for request, _ in works:
            if request.finish_reason == "error":
                for cache in (self.target_cache, self.drafter_cache):
                    cache.wipe(request.blocks[request.known :])
            else:
                self.scheduler.advance(request)
            if request.finish_reason is not None:
                self.scheduler.remove(request)


def _spans(works: list[Work]) -> list[Span]:
    return [Span(work.request.blocks, work.request.computed, work.tokens) for work in works]


def tiles(spans: list[Span], size: int) -> Iterator[list[Span]]:
    """The spans' tokens in their order, `size` at a time."""
    tile, room = list[Span](), size
    for blocks, start, length in spans:
        done = 0
        while done < length:
            part = min(room, length - done)
            tile.append(Span(blocks, start + done, part))
            done, room = done + part, room - part
            if not room:
                yield tile
                tile, room = [], size
    if tile:
        yield tile


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    return generator

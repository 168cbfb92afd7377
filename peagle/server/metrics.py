"""Metrics at /metrics: vLLM's names with vLLM's meanings, and further ones of this project."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from peagle.engine.engine import Engine
from peagle.engine.request import FinishReason, Request, Stats
from peagle.engine.tree import Draft

TABLES = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text())
# Counters that follow from a request's statistics.
DRAFTING: dict[str, Callable[[Stats], int]] = {
    "vllm:spec_decode_num_drafts": lambda s: s.rounds,
    "vllm:spec_decode_num_draft_tokens": lambda s: s.drafted,
    "vllm:spec_decode_num_accepted_tokens": lambda s: sum(s.accepted),
    "peagle:spec_decode_num_accepted_tokens_from_lookup": lambda s: s.accepted_from_lookup,
    "peagle:decode_forwards": lambda s: s.forwards,
    "peagle:decode_rows": lambda s: s.forwards + s.drafted,
    "peagle:decode_tokens": lambda s: s.tokens,
}


class Verified(NamedTuple):
    """A draft after its round."""

    draft: Draft
    tokens: list[int]  # the one before the draft, then the emitted ones


@dataclass(slots=True, eq=False)
class RequestMetrics:
    """A request, and the part of its numbers that has been counted."""

    request: Request
    arrived: float
    cached: int | None = None  # prompt tokens found in the cache, once it was admitted
    tokens: int = 0
    first: float = 0.0  # times of its first and last token
    last: float = 0.0
    preempted: int = 0
    stats: Stats = field(default_factory=Stats)
    draft: Draft = field(default_factory=Draft)  # as after the last round, where traced
    verified: list[Verified] = field(default_factory=list)  # not delivered yet

    @property
    def ended(self) -> bool:
        return self.request.finish_reason is not None

    def trace(self) -> None:
        """Note the draft that the last round has verified, if it has; call it before that round is
        counted. The engine replaces a request's draft and never changes it."""
        if self.request.stats.rounds > self.stats.rounds:
            start = self.request.prompt_length + self.tokens - 1
            self.verified.append(Verified(self.draft, self.request.tokens[start:]))
        self.draft = self.request.draft


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.model = model
        self.registry = registry = CollectorRegistry()
        pool = engine.scheduler.pool

        def made(kind: Any, name: str, about: str, **more: Any) -> Any:
            return kind(name, about, ["model_name"], registry=registry, **more).labels(model)

        def gauge(name: str, read: Callable[[], float]) -> None:
            made(Gauge, name, "Now.").set_function(read)

        def counter(name: str, about: str, label: str) -> Counter:
            return Counter(name, about, ["model_name", label], registry=registry)

        gauge("vllm:num_requests_running", lambda: len(engine.scheduler.running))
        self.queued = made(Gauge, "vllm:num_requests_waiting", "Now.")  # the worker knows them
        gauge("vllm:kv_cache_usage_perc", lambda: 1 - pool.free / pool.count)
        gauge("peagle:spec_decode_chosen_k", lambda: engine.last_depth)  # vLLM's K never changes
        counters = TABLES["counters"].items()
        self._counters = {name: made(Counter, name, about) for name, about in counters}
        self._histograms = {
            name: made(Histogram, name, "Seconds.", buckets=buckets)
            for name, buckets in TABLES["histograms"].items()
        }
        ended = counter("vllm:request_success", "Requests ended.", "finished_reason")
        self._ended = {reason: ended.labels(model, reason) for reason in get_args(FinishReason)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self._accepted = counter(name, "By position.", "position")
        for position in range(engine.settings.k):  # there from the start
            self._accepted.labels(model, position)

    def observe(self, track: RequestMetrics) -> None:
        """Count the progress of a request in a round."""
        request = track.request
        now = time.monotonic()
        admitted = request.num_computed_tokens or request.output or request.finish_reason == "error"
        if track.cached is None and admitted:
            track.cached = request.num_cached_tokens
            self._counters["vllm:prefix_cache_queries"].inc(request.prompt_length)
            self._counters["vllm:prefix_cache_hits"].inc(request.num_cached_tokens)
        new = len(request.tokens) - request.prompt_length - track.tokens
        if new:
            self._tokens(track, new, now)
        self._counters["vllm:num_preemptions"].inc(request.preempted - track.preempted)
        track.preempted = request.preempted
        self._drafting(track)
        if request.finish_reason is not None:
            self._ended[request.finish_reason].inc()
            self._histograms["vllm:e2e_request_latency_seconds"].observe(now - track.arrived)
            if track.tokens > 1:
                seconds = (track.last - track.first) / (track.tokens - 1)
                self._histograms["vllm:request_time_per_output_token_seconds"].observe(seconds)

    def _tokens(self, track: RequestMetrics, new: int, now: float) -> None:
        self._counters["vllm:generation_tokens"].inc(new)
        if track.tokens:
            self._histograms["vllm:inter_token_latency_seconds"].observe(now - track.last)
        else:
            track.first = now
            self._counters["vllm:prompt_tokens"].inc(track.request.prompt_length)
            self._histograms["vllm:time_to_first_token_seconds"].observe(now - track.arrived)
        track.tokens += new
        track.last = now

    def _drafting(self, track: RequestMetrics) -> None:
        stats = track.request.stats
        before = track.stats
        if stats.forwards == before.forwards:
            return
        for name, count in DRAFTING.items():
            self._counters[name].inc(count(stats) - count(before))
        positions = zip_longest(stats.accepted, before.accepted, fillvalue=0)
        for position, (new, old) in enumerate(positions):
            if new > old:  # finding a counter takes longer than all else here
                self._accepted.labels(self.model, position).inc(new - old)
        track.stats = stats + Stats()  # a copy

"""What /metrics says: by vLLM's names with vLLM's meanings, and by names of our own beside them."""

import time
from dataclasses import dataclass, field
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from peagle.engine.engine import Engine
from peagle.engine.request import Request, Stats

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
           7680)  # fmt: skip
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
               10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
         80)  # fmt: skip
REASONS = ("stop", "length", "abort", "error")
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens found.",
    "prompt_tokens": "Of prompts that have been run.",
    "generation_tokens": "Of answers.",
    "num_preemptions": "Requests put off for others.",
    "spec_decode_num_drafts": "Rounds with drafts.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Of them, accepted.",
}
OWN_COUNTERS = {
    "spec_decode_num_accepted_tokens_from_lookup": "Accepted draft tokens that the head did not "
    "offer.",
    "decode_forwards": "Target forwards that decoded, once for each request in them.",
    "decode_rows": "Rows of these forwards: the newest token of each request, and its draft.",
    "decode_tokens": "Tokens that they emitted: all but each answer's first.",
}
HISTOGRAMS = {
    "time_to_first_token": FIRST_TOKEN,
    "inter_token_latency": TOKEN,
    "request_time_per_output_token": TOKEN,
    "e2e_request_latency": LATENCY,
}


@dataclass(slots=True, eq=False)
class Track:
    """A request, and what of it has been counted."""

    request: Request
    arrived: float
    cached: int | None = None  # prompt tokens found in the cache, once it was admitted
    tokens: int = 0
    first: float = 0.0  # times of its first and last tokens
    last: float = 0.0
    preempted: int = 0
    stats: Stats = field(default_factory=Stats)

    @property
    def ended(self) -> bool:
        return self.request.finish_reason is not None


class Metrics:
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.model = model
        self.registry = registry = CollectorRegistry()
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        gauges = {
            "vllm:num_requests_running": lambda: len(scheduler.running),
            "vllm:num_requests_waiting": lambda: len(scheduler.waiting),
            "vllm:kv_cache_usage_perc": lambda: 1 - pool.free / pool.count,
            "peagle:spec_decode_chosen_k": lambda: engine.last_depth,  # vLLM's K never changes
        }
        for name, read in gauges.items():
            gauge = Gauge(name, "Now.", ["model_name"], registry=registry)
            gauge.labels(model).set_function(read)
        self._counters = {}
        for owner, counters in (("vllm", COUNTERS), ("peagle", OWN_COUNTERS)):
            for name, what in counters.items():
                counter = Counter(f"{owner}:{name}", what, ["model_name"], registry=registry)
                self._counters[name] = counter.labels(model)
        self._histograms = {}
        for name, buckets in HISTOGRAMS.items():
            histogram = Histogram(
                f"vllm:{name}_seconds", "Seconds.", ["model_name"],
                buckets=buckets, registry=registry,
            )  # fmt: skip
            self._histograms[name] = histogram.labels(model)
        labels = ["model_name", "finished_reason"]
        ended = Counter("vllm:request_success", "Requests ended.", labels, registry=registry)
        self._ended = {reason: ended.labels(model, reason) for reason in REASONS}
        name, labels = "spec_decode_num_accepted_tokens_per_pos", ["model_name", "position"]
        accepted = Counter(f"vllm:{name}", "By position.", labels, registry=registry)
        for position in range(engine.settings.k):  # there from the start
            accepted.labels(model, position)
        self._accepted = accepted

    def observe(self, track: Track) -> None:
        """Count what a round did for a request."""
        request, now = track.request, time.monotonic()
        admitted = request.num_computed_tokens or request.output or request.finish_reason == "error"
        if track.cached is None and admitted:
            track.cached = request.reused
            self._counters["prefix_cache_queries"].inc(request.prompt_length)
            self._counters["prefix_cache_hits"].inc(request.reused)
        new = len(request.tokens) - request.prompt_length - track.tokens
        if new:
            self._tokens(track, new, now)
        self._counters["num_preemptions"].inc(request.preempted - track.preempted)
        track.preempted = request.preempted
        self._drafting(track)
        if request.finish_reason is not None:
            self._ended[request.finish_reason].inc()
            self._histograms["e2e_request_latency"].observe(now - track.arrived)
            if track.tokens > 1:
                seconds = (track.last - track.first) / (track.tokens - 1)
                self._histograms["request_time_per_output_token"].observe(seconds)

    def _tokens(self, track: Track, new: int, now: float) -> None:
        self._counters["generation_tokens"].inc(new)
        if track.tokens:
            self._histograms["inter_token_latency"].observe(now - track.last)
        else:
            track.first = now
            self._counters["prompt_tokens"].inc(track.request.prompt_length)
            self._histograms["time_to_first_token"].observe(now - track.arrived)
        track.tokens += new
        track.last = now

    def _drafting(self, track: Track) -> None:
        stats, before = track.request.stats, track.stats
        if stats.forwards == before.forwards:
            return
        now, then = _counts(stats), _counts(before)
        for name, count in now.items():
            self._counters[name].inc(count - then[name])
        positions = zip_longest(stats.accepted, before.accepted, fillvalue=0)
        for position, (new, old) in enumerate(positions):
            self._accepted.labels(self.model, position).inc(new - old)
        track.stats = stats + Stats()  # a copy


def _counts(stats: Stats) -> dict[str, int]:
    """The counters that follow from a request's statistics."""
    return {
        "spec_decode_num_drafts": stats.rounds,
        "spec_decode_num_draft_tokens": stats.drafted,
        "spec_decode_num_accepted_tokens": sum(stats.accepted),
        "spec_decode_num_accepted_tokens_from_lookup": stats.accepted_from_lookup,
        "decode_forwards": stats.forwards,
        "decode_rows": stats.forwards + stats.drafted,
        "decode_tokens": stats.tokens,
    }

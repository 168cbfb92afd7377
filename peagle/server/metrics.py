"""What /metrics says, by vLLM's names and meanings."""

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from peagle.engine.engine import Engine
from peagle.engine.request import Request

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
           7680)  # fmt: skip
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
               10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
         80)  # fmt: skip
REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True, eq=False)
class Track:
    """A request, and what of it has been counted."""

    request: Request
    arrived: float = field(default_factory=time.monotonic)
    cached: int | None = None  # prompt tokens found in the cache, once it was admitted
    tokens: int = 0
    first: float = 0.0  # times of its first and last tokens
    last: float = 0.0
    preempted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.request.finish_reason is not None


class Metrics:
    """A registry of its own, so that several servers may live in one process."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.model = model
        self._families = dict[str, Counter]()
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        gauges = {
            "vllm:num_requests_running": lambda: len(scheduler.running),
            "vllm:num_requests_waiting": lambda: len(scheduler.waiting),
            "vllm:kv_cache_usage_perc": lambda: 1 - pool.free / pool.count,
            "peagle:spec_decode_chosen_k": lambda: engine.chosen,  # vLLM's K never changes
        }
        for name, read in gauges.items():
            gauge = Gauge(name, "Now.", ["model_name"], registry=self.registry)
            gauge.labels(model).set_function(read)
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._prompt = self._counter("prompt_tokens", "Of prompts that have been run.")
        self._generated = self._counter("generation_tokens", "Of answers.")
        self._preemptions = self._counter("num_preemptions", "Requests put off for others.")
        self._ended = {
            reason: self._counter("request_success", "Requests ended.", finished_reason=reason)
            for reason in REASONS
        }
        self._first = self._histogram("time_to_first_token", FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency", TOKEN)
        self._per_token = self._histogram("request_time_per_output_token", TOKEN)
        self._whole = self._histogram("e2e_request_latency", LATENCY)
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with drafts.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Of them, accepted.")
        self._positions = [
            self._counter("spec_decode_num_accepted_tokens_per_pos", "By place.", position=str(i))
            for i in range(engine.settings.k)
        ]

    def observe(self, track: Track) -> None:
        """Count what a round has brought."""
        request, now = track.request, time.monotonic()
        admitted = request.num_computed_tokens or request.output or request.finish_reason == "error"
        if track.cached is None and admitted:
            track.cached = request.reused
            self._queries.inc(request.prompt_length)
            self._hits.inc(request.reused)
        new = len(request.tokens) - request.prompt_length - track.tokens
        if new:
            self._tokens(track, new, now)
        self._preemptions.inc(request.preempted - track.preempted)
        track.preempted = request.preempted
        self._drafting(track)
        if request.finish_reason is not None:
            self._ended[request.finish_reason].inc()
            self._whole.observe(now - track.arrived)
            if track.tokens > 1:
                self._per_token.observe((track.last - track.first) / (track.tokens - 1))

    def _tokens(self, track: Track, new: int, now: float) -> None:
        self._generated.inc(new)
        if not track.tokens:
            track.first = now
            self._prompt.inc(track.request.prompt_length)
            self._first.observe(now - track.arrived)
        else:
            self._between.observe(now - track.last)
        track.tokens, track.last = track.tokens + new, now

    def _drafting(self, track: Track) -> None:
        stats = track.request.stats
        if stats.rounds == track.rounds:
            return
        self._drafts.inc(stats.rounds - track.rounds)
        self._drafted.inc(stats.drafted - track.drafted)
        self._accepted.inc(sum(stats.accepted) - sum(track.accepted))
        before = track.accepted + [0] * (len(stats.accepted) - len(track.accepted))
        for counter, old, new in zip(self._positions, before, stats.accepted, strict=False):
            counter.inc(new - old)
        track.rounds, track.drafted = stats.rounds, stats.drafted
        track.accepted = list(stats.accepted)

    def _counter(self, name: str, what: str, **labels: str) -> Counter:
        if name not in self._families:
            names = ["model_name", *labels]
            self._families[name] = Counter(f"vllm:{name}", what, names, registry=self.registry)
        return self._families[name].labels(self.model, *labels.values())

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            f"vllm:{name}_seconds", "Seconds.", ["model_name"], buckets=buckets,
            registry=self.registry,
        )  # fmt: skip
        return made.labels(self.model)

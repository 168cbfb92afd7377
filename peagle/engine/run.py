"""One call of `LLM.generate` or `LLM.stream`, and its answers."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from peagle.engine.engine import Engine
from peagle.engine.params import TokenLogprob
from peagle.engine.request import Chunk, FinishReason, Request, Stats


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to one prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    drafted: list[bool]  # True: the token was an accepted draft token
    logprobs: list[TokenLogprob] | None = None  # of token_ids, where requested
    failure: str | None = None  # the reason, where finish_reason is "error"

    @classmethod
    def of(cls, request: Request) -> "Completion":
        """The answer of a request that has ended."""
        assert request.finish_reason is not None, "iterate to the end first"
        return cls(
            request.text.text,
            request.output,
            request.finish_reason,
            request.stats,
            request.drafted_output,
            None if request.params.logprobs is None else request.logprobs,
            request.failure,
        )


class Run:
    """Requests that an engine answers together. `seconds` is the time spent in the engine."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.requests = requests
        self.seconds = 0.0
        self._begun = False

    def __iter__(self) -> Iterator[Chunk]:
        """Left early, the requests that still run are cancelled."""
        try:
            while any(request.finish_reason is None for request in self.requests):
                yield from self.step()
            # The step of another stream may have been the last.
            yield from self.engine.fetch(*self.requests)
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the requests that still run. Iteration does it by itself; a caller of `step` that
        stops early must."""
        if self._begun:
            for request in self.requests:
                self.engine.cancel(request)

    def step(self) -> list[Chunk]:
        """One round of the engine; returns the chunks that it emitted for these requests."""
        started = time.perf_counter()
        if not self._begun:
            self.engine.add(*self.requests)
            self._begun = True
        self.engine.step()
        self.seconds += time.perf_counter() - started
        return self.engine.fetch(*self.requests)

    def ended(self) -> Iterator[tuple[int, Completion]]:
        """Each answer when it ends, with its number; `failure` is set of one that failed."""
        left = self.requests
        with closing(self):
            while left:
                self.step()
                with self.engine.lock:  # another thread's round may be ending one
                    ended = [request for request in left if request.finish_reason is not None]
                left = [request for request in left if request not in ended]
                for request in ended:
                    yield request.index, Completion.of(request)

    def completions(self) -> list[Completion]:
        """Answers in the order of the prompts, once iteration has ended."""
        return [Completion.of(request) for request in self.requests]

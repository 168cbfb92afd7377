"""An answer, once it has ended."""

from dataclasses import dataclass

from peagle.engine.params import TokenLogprob
from peagle.engine.request import FinishReason, Request, Stats


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

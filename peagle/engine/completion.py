"""An answer, once it has ended."""

from dataclasses import dataclass

from peagle.engine.params import TokenLogprob
from peagle.engine.request import FinishReason, Stats


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to one prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    drafted: list[bool]  # which of token_ids were accepted draft tokens
    logprobs: list[TokenLogprob] | None = None  # of token_ids, where asked for
    failure: str | None = None  # why finish_reason is "error"

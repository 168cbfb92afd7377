"""A request while it runs, its output, and how drafting fares."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from peagle.engine.lookup import Index
from peagle.engine.params import SamplingParams, TokenLogprob
from peagle.engine.tree import Draft

if TYPE_CHECKING:
    from peagle.engine.sampling import Sampler
    from peagle.engine.text import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]  # cancelled; RequestFailure


@dataclass(slots=True)
class Stats:
    """Drafting statistics as vLLM counts: before truncation at a stop, rounds with drafts only."""

    rounds: int = 0
    drafted: int = 0  # nodes
    accepted: list[int] = field(default_factory=list)  # rounds whose i-th place was accepted

    def count(self, draft: Draft, accepted: int) -> None:
        """Add one verified round, in which so many places of a draft were accepted."""
        self.rounds += 1
        self.drafted += len(draft)
        self.accepted += [0] * (draft.depth - len(self.accepted))
        for place in range(accepted):
            self.accepted[place] += 1

    def __add__(self, other: "Stats") -> "Stats":
        """Of both; `sum(many, Stats())` is of all."""
        positions = zip_longest(self.accepted, other.accepted, fillvalue=0)
        accepted = [mine + theirs for mine, theirs in positions]
        return Stats(self.rounds + other.rounds, self.drafted + other.drafted, accepted)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of all rounds whose i-th draft token was accepted (unconditional)."""
        return [count / self.rounds for count in self.accepted]


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Of a request that decodes, all tokens but the newest have been run:
    `num_computed_tokens == len(tokens) - 1`."""

    index: int  # in the caller's list
    prompt_length: int
    tokens: list[int]  # prompt, then output
    params: SamplingParams
    num_computed_tokens: int = 0  # tokens the target has run and keeps
    num_drafter_slots: int = 0  # slots the drafter has run and keeps, at most as many
    draft: Draft = field(default_factory=Draft)  # to verify in the next round
    seen: Index = field(default_factory=Index)  # of its tokens, for lookup
    blocks: list[int] = field(default_factory=list)  # of KV cache; the scheduler's, as are:
    known: int = 0  # the number of these blocks that can be found by their content
    content: int = 0  # content id of the last known block
    reused: int = 0  # prompt tokens that were cached when the request was admitted
    preempted: int = 0  # how often
    drafted_output: list[bool] = field(default_factory=list)  # output token i was a draft token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, where asked for
    text: "TextStream" = field(init=False)  # LLM.prepare fills these two in
    sampler: "Sampler" = field(init=False)
    emitted: list["Chunk"] = field(default_factory=list)  # output that was not fetched yet
    finish_reason: FinishReason | None = None
    failure: str | None = None  # why, where that is "error"
    stats: Stats = field(default_factory=Stats)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def left(self) -> int:
        """Tokens that it may say behind its next one."""
        return self.params.max_tokens - (len(self.tokens) - self.prompt_length) - 1

    @property
    def pending(self) -> list[int]:
        """What the next rounds run: the tokens not yet run, then the draft."""
        return self.tokens[self.num_computed_tokens :] + self.draft.tokens

    @property
    def num_pending(self) -> int:
        """The number of pending tokens."""
        return len(self.tokens) - self.num_computed_tokens + len(self.draft)


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of streamed text of answer `index`. With log-probabilities there is one chunk per
    token, even if its text is empty."""

    index: int
    text: str
    place: int  # in the draft, from 1; 0: the target's own token
    logprob: TokenLogprob | None = None

    @property
    def drafted(self) -> bool:
        """An accepted draft token wrote it."""
        return self.place > 0


def pieces(chunks: list[Chunk]) -> list[dict[str, Any]]:
    """Text as it was emitted, with each piece's place in the draft; 0: the target's own."""
    return [{"text": chunk.text, "place": chunk.place} for chunk in chunks]

"""A request while it runs, its output, and how drafting fares."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from peagle.engine.lookup import Index
from peagle.engine.params import SamplingParams, TokenLogprob
from peagle.engine.tree import Draft, Source

if TYPE_CHECKING:
    from peagle.engine.sampling import Sampler
    from peagle.engine.text import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]  # cancelled; RequestFailure


@dataclass(slots=True)
class Stats:
    """Drafting statistics. Rounds, drafted and accepted are counted as vLLM does: before truncation
    at a stop, rounds with drafts only. Forwards and tokens are those of all decoding."""

    rounds: int = 0
    drafted: int = 0  # nodes
    accepted: list[int] = field(default_factory=list)  # rounds whose i-th draft token was accepted
    accepted_from_lookup: int = 0  # nodes that the head did not offer
    forwards: int = 0  # target forwards that decoded the request, with or without a draft
    tokens: int = 0  # emitted by these forwards

    def count(self, draft: Draft, path: Sequence[int], emitted: int) -> None:
        """Add a target forward that decoded: the rows `path` of its draft were accepted."""
        self.forwards += 1
        self.tokens += emitted
        if not draft:
            return
        self.rounds += 1
        self.drafted += len(draft)
        self.accepted += [0] * (draft.depth - len(self.accepted))
        for depth, row in enumerate(path):
            self.accepted[depth] += 1
            self.accepted_from_lookup += draft.source(row) == "lookup"

    def __add__(self, other: "Stats") -> "Stats":
        """The statistics of both; `sum(many, Stats())` adds up many."""
        both = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        accepted = map(sum, zip_longest(*both.pop("accepted"), fillvalue=0))
        return Stats(accepted=list(accepted), **{name: sum(pair) for name, pair in both.items()})

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of all rounds whose i-th draft token was accepted (unconditional); empty where no
        round was."""
        return [count / self.rounds for count in self.accepted if self.rounds]

    @property
    def nodes_per_round(self) -> float:
        """Draft tokens a round with drafts."""
        return self.drafted / self.rounds if self.rounds else 0.0

    @property
    def rows_per_round(self) -> float:
        """Target rows a decoding round, with or without drafts: 1 + its nodes."""
        return 1 + self.drafted / self.forwards if self.forwards else 1.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens emitted a decoding round, with or without drafts: unlike the acceptance length,
        drafting seldom does not raise it."""
        return self.tokens / self.forwards if self.forwards else 1.0


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Of a request that decodes, all tokens but the newest have been run:
    `num_computed_tokens == len(tokens) - 1`."""

    index: int  # in the caller's list
    prompt_length: int
    tokens: list[int]  # prompt, then output
    params: SamplingParams
    sampler: "Sampler"
    text: "TextStream"
    num_computed_tokens: int = 0  # tokens the target has run and keeps
    num_drafter_slots: int = 0  # slots the drafter has run and keeps, at most as many
    draft: Draft = field(default_factory=Draft)  # to verify in the next round
    seen: Index = field(default_factory=Index)  # n-grams of its tokens, for lookup
    blocks: list[int] = field(default_factory=list)  # blocks of KV cache; the scheduler's, as are:
    num_cached_blocks: int = 0  # first blocks that can be found by their content
    prefix_id: int = 0  # of the tokens in these blocks
    num_freed_blocks: int = 0  # first blocks that no layer's window reaches any more
    num_cached_tokens: int = 0  # tokens that were cached when it was last admitted
    preempted: int = 0  # how often
    drafted_output: list[bool] = field(default_factory=list)  # output token i was a draft token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, if requested
    emitted: list["Chunk"] = field(default_factory=list)  # output that was not fetched yet
    finish_reason: FinishReason | None = None
    failure: str | None = None  # why, where that is "error"
    grammar_failed: bool = False  # the failure is that its grammar became too complex
    stats: Stats = field(default_factory=Stats)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def left(self) -> int:
        """Tokens that it may still emit after the next one."""
        return self.params.max_tokens - (len(self.tokens) - self.prompt_length) - 1

    @property
    def pending(self) -> list[int]:
        """The input of the next rounds: the tokens not yet run, then the draft."""
        return self.tokens[self.num_computed_tokens :] + self.draft.tokens

    @property
    def num_pending(self) -> int:
        """The number of pending tokens."""
        return len(self.tokens) - self.num_computed_tokens + len(self.draft)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of streamed text of answer `index`. With log-probabilities there is one chunk per
    token, even if its text is empty."""

    index: int
    text: str
    depth: int  # in the draft, from 1; 0: the target's own token
    source: Source
    logprob: TokenLogprob | None = None

    @property
    def drafted(self) -> bool:
        """An accepted draft token wrote it."""
        return self.depth > 0

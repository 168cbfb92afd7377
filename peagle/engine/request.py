"""A request: what was asked, what has been said, and how drafting fared."""

from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.config import InputError
from peagle.engine.depth import Odds

FinishReason = Literal["stop", "length", "abort", "error"]  # cancelled; not a number in its logits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens: temperature 0 is greedy; filters as in vLLM, min-p, top-k, top-p."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()  # cut from the text
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
        ]
        for name, value, fine, allowed in checks:
            if not fine:
                raise InputError(f"{name} {value}: must be {allowed}")
        if any(not text for text in self.stop):
            raise InputError("stop '': a stop string must not be empty")


@dataclass(slots=True)
class Stats:
    """Drafting statistics as vLLM counts: before truncation at a stop, rounds with drafts only."""

    rounds: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)  # rounds whose i-th draft token was accepted

    def count(self, drafted: int, accepted: int) -> None:
        """Add one verified round."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += [0] * (drafted - len(self.accepted))
        for position in range(accepted):
            self.accepted[position] += 1

    def add(self, other: "Stats") -> None:
        """Add another request's counts."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += [0] * (len(other.accepted) - len(self.accepted))
        for position, count in enumerate(other.accepted):
            self.accepted[position] += count

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
    """State of one request. Of a request that decodes all tokens but the newest have been run:
    `computed == len(tokens) - 1`."""

    index: int  # in the caller's list
    prompt_length: int
    tokens: list[int]  # prompt, then output
    params: SamplingParams
    computed: int = 0  # tokens the target has run and keeps
    slots: int = 0  # slots the drafter has run and keeps, at most `computed`
    features: list[Any] = field(default_factory=list)  # of tokens slots … computed − 1, (n, F·E)
    draft: list[int] = field(default_factory=list)  # to verify in the next round
    blocks: list[int] = field(default_factory=list)  # of KV cache; the scheduler's, as are:
    known: int = 0  # of them, those that can be found by their content
    content: int = 0  # content id of the last of these
    reused: int = 0  # tokens whose keys were found when the request was admitted
    preempted: int = 0  # times
    odds: Odds = field(default_factory=Odds)  # of its draft tokens
    drafted_output: list[bool] = field(default_factory=list)  # output token i was a draft token
    text: Any = None  # TextStream, and the random numbers of sampling: the engine's, from `add` on
    generator: Any = None
    said: list["Chunk"] = field(default_factory=list)  # text that nobody has taken yet
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        """What the next rounds run: the tokens not yet run, then the draft."""
        return self.tokens[self.computed :] + self.draft


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    drafted: list[bool]  # which of token_ids were accepted draft tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of streamed text of prompt `index`; `drafted` when an accepted draft wrote it."""

    index: int
    text: str
    drafted: bool

"""A request: what was asked, what has been said, and how drafting fared."""

import json
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from peagle.config import InputError, first_line

FinishReason = Literal["stop", "length", "abort", "error"]  # cancelled; RequestFailure
CONSTRAINTS = ("json_schema", "regex", "grammar")


class RequestFailure(RuntimeError):
    """One request cannot go on, through no fault of the others."""


class TokenLogprob(NamedTuple):
    """What the target itself thought of an emitted token: natural logarithms of its probabilities
    before bias, penalties, grammar and temperature (vLLM's are taken behind the grammar)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens and theirs, best first


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens: temperature 0 is greedy. Meanings and order as in vLLM: bias,
    penalties, grammar, temperature, min-p, top-k, top-p."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()  # cut from the text
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # end the answer, too; they have no text
    repetition_penalty: float = 1.0  # divides logits of tokens in prompt or output
    presence_penalty: float = 0.0  # off the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, for each time they occur
    logit_bias: dict[int, float] | None = None  # added to the logits of token ids
    logprobs: int | None = None  # of emitted tokens, with so many of the likeliest besides
    n: int = 1  # answers a prompt, with seeds seed, seed + 1, …
    json_schema: dict[str, Any] | str | None = None  # the answer is JSON that it admits
    regex: str | None = None  # the whole answer matches it
    grammar: str | None = None  # the answer is derived from this Lark grammar

    def __post_init__(self) -> None:
        checks = [
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "0 (greedy) to 100"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("repetition_penalty", self.repetition_penalty,
             0.01 <= self.repetition_penalty <= 100, "0.01 to 100 (1 is none)"),
            ("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 2, "-2 to 2"),
            ("frequency_penalty", self.frequency_penalty,
             abs(self.frequency_penalty) <= 2, "-2 to 2"),
            ("logprobs", self.logprobs, (self.logprobs or 0) >= 0, "0 (the token's own) or more"),
            ("n", self.n, self.n >= 1, "at least 1"),
        ]  # fmt: skip
        for name, value, fine, allowed in checks:
            if not fine:
                raise InputError(f"{name} {value}: must be {allowed}")
        if any(not text for text in self.stop):
            raise InputError("stop '': a stop string must not be empty")
        for token, bias in (self.logit_bias or {}).items():
            if not abs(bias) <= 100:
                raise InputError(f"logit_bias {{{token}: {bias}}}: must be -100 to 100")
        if self.n > 1 and self.greedy:
            raise InputError(
                f"n {self.n}: greedy answers are all the same, set a temperature above 0 or n to 1"
            )
        self._check_constraint()

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            both = " and ".join(given)
            raise InputError(f"{both}: an answer follows one of them, leave the others out")
        if given and self.ignore_eos:
            raise InputError(
                f"ignore_eos True: {given[0]} says where the answer ends, leave it out"
            )
        if "" in (self.regex, self.grammar):
            raise InputError(f"{given[0]} '': must not be empty")
        if self.json_schema is not None:
            _json_text(self.json_schema)

    @property
    def greedy(self) -> bool:
        """No draws; a temperature so small is greedy in vLLM, too."""
        return self.temperature < 1e-5

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(which of json_schema, regex and grammar is given, its text)."""
        if self.json_schema is not None:
            return "json_schema", _json_text(self.json_schema)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    def copies(self) -> list["SamplingParams"]:
        """The parameters of each of the n answers: seeds seed, seed + 1, …"""
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return [self] if self.n == 1 else [replace(self, n=1, seed=seed) for seed in seeds]


def _json_text(schema: dict[str, Any] | str) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"json_schema: not JSON ({first_line(error)}), give a schema") from error
    if not isinstance(value, dict):
        raise InputError(f'json_schema {text}: must be an object such as {{"type": "array"}}')
    return text


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
    """State of one request. Of a request that decodes all tokens but the newest have been run:
    `computed == len(tokens) - 1`."""

    index: int  # in the caller's list
    prompt_length: int
    tokens: list[int]  # prompt, then output
    params: SamplingParams
    computed: int = 0  # tokens the target has run and keeps
    slots: int = 0  # slots the drafter has run and keeps, at most `computed`
    draft: list[int] = field(default_factory=list)  # to verify in the next round
    sure: list[float] = field(default_factory=list)  # probabilities the drafter gave these tokens
    blocks: list[int] = field(default_factory=list)  # of KV cache; the scheduler's, as are:
    known: int = 0  # of them, those that can be found by their content
    content: int = 0  # content id of the last of these
    reused: int = 0  # tokens whose keys were found when the request was admitted
    preempted: int = 0  # times
    drafted_output: list[bool] = field(default_factory=list)  # output token i was a draft token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, where asked for
    text: Any = None  # TextStream and Sampler: the engine's, from `add` on
    sampler: Any = None
    said: list["Chunk"] = field(default_factory=list)  # text that nobody has taken yet
    finish_reason: FinishReason | None = None
    failure: str | None = None  # why, where that is "error"
    stats: Stats = field(default_factory=Stats)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> list[int]:
        """What the next rounds run: the tokens not yet run, then the draft."""
        return self.tokens[self.computed :] + self.draft

    @property
    def left(self) -> int:
        """How many tokens are pending."""
        return len(self.tokens) - self.computed + len(self.draft)


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
    """A piece of streamed text of answer `index`. Where log-probabilities are asked for there is
    one chunk a token, be its text empty."""

    index: int
    text: str
    place: int  # in the draft, from 1; 0: the target's own token
    logprob: TokenLogprob | None = None

    @property
    def drafted(self) -> bool:
        """An accepted draft token wrote it."""
        return self.place > 0


def pieces(chunks: list[Chunk]) -> list[dict[str, Any]]:
    """Text as it was said, each with its place in the draft that wrote it; 0: in none."""
    return [{"text": chunk.text, "place": chunk.place} for chunk in chunks]

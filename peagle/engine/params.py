"""What is asked of a request, and what it can fail with."""

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from peagle.errors import InputError, first_line

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

    temperature: Annotated[float, "Sampling temperature, at least 0; 0 is greedy decoding."] = 0.0
    top_p: Annotated[
        float, "Nucleus sampling: keep the likeliest tokens that add up to this (0 to 1)."
    ] = 1.0
    top_k: Annotated[int, "Number of most likely tokens to sample from; 0 keeps all tokens."] = 0
    min_p: Annotated[
        float, "Drop tokens less likely than this fraction (0 to 1) of the most likely one."
    ] = 0.0
    seed: Annotated[
        int | None, "Seed of the random number generator. Default: a new one for every run."
    ] = None
    max_tokens: Annotated[int, "Maximum number of tokens generated for one answer."] = 256
    stop: Annotated[
        tuple[str, ...], "Text at which generation stops; repeat the option for several texts."
    ] = ()
    ignore_eos: Annotated[bool, "Generate `max_tokens` tokens even after end of text."] = False
    stop_token_ids: tuple[int, ...] = ()  # end the answer, too; they have no text
    repetition_penalty: Annotated[
        float, "Penalty on tokens that occur in the prompt or the answer, above 0; 1 is none."
    ] = 1.0
    presence_penalty: Annotated[
        float, "Amount subtracted from the logit of each token that occurs in the answer (-2 to 2)."
    ] = 0.0
    frequency_penalty: Annotated[
        float, "Amount subtracted from a token's logit each time it occurs in the answer (-2 to 2)."
    ] = 0.0
    logit_bias: dict[int, float] | None = None  # added to the logits of token ids
    logprobs: Annotated[
        int | None, "Number of likeliest tokens given with each token, with log-probabilities."
    ] = None
    n: int = 1  # answers a prompt, with seeds seed, seed + 1, …
    json_schema: dict[str, Any] | str | None = None  # the answer is JSON that it admits
    regex: Annotated[str | None, "Regular expression that the whole answer must match."] = None
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

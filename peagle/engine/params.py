"""Sampling parameters, and failures of single requests."""

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from peagle.errors import InputError, first_line

CONSTRAINTS = ("json_schema", "regex", "grammar")


class RequestFailure(RuntimeError):
    """One request cannot go on, through no fault of the others."""


class GrammarTooComplex(RequestFailure):
    """A request's grammar exceeds the limits in the middle of its answer."""


class TokenLogprob(NamedTuple):
    """Log-probability (natural) of an emitted token under the target, before bias, penalties,
    grammar and temperature. (vLLM takes it after the grammar.)"""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request: sampling, stops, log-probabilities, grammar. Meanings and order
    as in vLLM: bias, penalties, grammar, temperature, min-p, top-k, top-p.

    Sampling:
    temperature: Sampling temperature, at least 0; 0 is greedy decoding.
    top_p: Nucleus sampling: keep the smallest set of tokens whose probability reaches this value (0
        to 1).
    top_k: Number of most likely tokens to sample from; 0 keeps all tokens.
    min_p: Drop tokens less likely than this fraction (0 to 1) of the most likely token's
        probability.
    seed: Seed of the random number generator. Default: a new one for every run.
    max_tokens: Maximum number of tokens generated for one answer.
    stop: Text at which generation stops; repeat the option for several texts.
    ignore_eos: Generate `max_tokens` tokens even after end of text.
    stop_token_ids: Token ids that end the answer; they have no text.
    repetition_penalty: Penalty on tokens that occur in the prompt or the answer, above 0; 1 is
        none.
    presence_penalty: Amount subtracted from the logit of each token that occurs in the answer (-2
        to 2).
    frequency_penalty: Amount subtracted from a token's logit for each time it occurs in the answer
        (-2 to 2).
    logit_bias: Amount added to the logit of each of these token ids.
    logprobs: Number of most likely tokens whose log-probabilities are given with each token.
    n: Number of answers to a prompt, with seeds seed, seed + 1, and so on.
    json_schema: JSON schema that the answer must satisfy (structured output).
    regex: Regular expression that the whole answer must match.
    grammar: Lark grammar that the answer must be derived from.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    n: int = 1
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": (0 <= self.temperature <= 100, "0 (greedy) to 100"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "0.01 to 100 (1: none)"),
            "presence_penalty": (abs(self.presence_penalty) <= 2, "-2 to 2"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 2, "-2 to 2"),
            "logprobs": ((self.logprobs or 0) >= 0, "0 (the token's own) or more"),
            "n": (self.n >= 1, "at least 1"),
            "seed": (abs(self.seed or 0) < 2**63, "less than 2**63 from 0"),
            "stop": (not isinstance(self.stop, str), "a list of texts"),
        }
        for name, (fine, allowed) in checks.items():
            if not fine:
                raise InputError(f"must be {allowed}", field=name, value=getattr(self, name))
        if "" in self.stop:
            raise InputError("must not be empty", field="stop", value="")
        for token, bias in (self.logit_bias or {}).items():
            if not abs(bias) <= 100:
                raise InputError("must be -100 to 100", field="logit_bias", value={token: bias})
        if self.n > 1 and self.greedy:
            fix = "set `temperature` above 0 or `n` to 1"
            raise InputError("greedy answers are all the same", field="n", value=self.n, fix=fix)
        self._check_constraint()

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            why = f"excludes `{given[1]}`"
            raise InputError(why, field=given[0], fix="leave one of them out")
        if given and self.ignore_eos:
            why = f"`{given[0]}` decides where the answer ends"
            raise InputError(why, field="ignore_eos", value=True, fix="leave it out")
        if "" in (self.regex, self.grammar):
            raise InputError("must not be empty", field=given[0], value="")
        if self.json_schema is not None:
            _json_text(self.json_schema)

    @property
    def greedy(self) -> bool:
        """No token is drawn. The same temperatures are greedy in vLLM."""
        return self.temperature < 1e-5

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(json_schema, regex or grammar, its text); None without any."""
        if self.json_schema is not None:
            return "json_schema", _json_text(self.json_schema)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    def copies(self) -> list["SamplingParams"]:
        """The parameters of each of the n answers: seeds seed, seed + 1, …"""
        if self.seed is None:
            return [replace(self, n=1)] * self.n
        return [replace(self, n=1, seed=self.seed + i) for i in range(self.n)]


def _json_text(schema: dict[str, Any] | str) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"not JSON ({first_line(error)})"
        raise InputError(why, field="json_schema", fix="give a schema") from error
    if not isinstance(value, dict):
        why = 'must be an object such as {"type": "array"}'
        raise InputError(why, field="json_schema", value=value)
    return text

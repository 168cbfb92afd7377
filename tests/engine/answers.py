"""Answers of several requests: without drafts, and what is compared."""

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.run import Completion
from peagle.model.target import Target

Params = SamplingParams | list[SamplingParams]


def alone(
    target: Target, prompts: list[list[int]], params: Params, **settings: int
) -> list[Completion]:
    """Answers of the target without drafts."""
    return LLM(target, lookup=False, **settings).generate(prompts, params)


def token_ids(done: list[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in done]


def outcome(done: list[Completion]) -> list[tuple[list[int], str, str]]:
    """Tokens, text, and how each answer ended."""
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in done]


def accepted(done: list[Completion]) -> int:
    """Number of accepted draft tokens."""
    return sum(sum(answer.stats.accepted) for answer in done)

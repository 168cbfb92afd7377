"""An LLM whose answers are given."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.engine.params import SamplingParams
from peagle.engine.run import Completion

Answers = Iterable[tuple[int, Completion]]  # with the numbers of their prompts, as they end


def answering(
    tokenizer: PreTrainedTokenizerBase,
    max_context: int,
    generate: Callable[[list[list[int]], list[SamplingParams]], Answers],
) -> Any:
    """The part of an LLM that `regenerate` needs."""
    llm = SimpleNamespace(tokenizer=tokenizer, target=SimpleNamespace(), context=max_context)
    llm.stream = lambda *given: SimpleNamespace(ended=lambda: generate(*given))
    llm.max_batch = 1
    return llm

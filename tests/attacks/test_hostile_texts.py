"""Answers that are no text: lone bytes, halves of characters, special tokens, in any order.

What a stream emits is what the tokenizer decodes from the same tokens, the bytes of
log-probabilities are that text, and no request costs another one its answer.
"""

from collections.abc import Callable
from typing import Any

import pytest
from serving_alone import LONG
from thinking import byte_fallback, byte_level, thinking_target
from transformers import PreTrainedTokenizerFast

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.server.logprobs import AnswerLogprobs

Make = Callable[[], PreTrainedTokenizerFast]
ROUNDS = 200 if LONG else 20
STOPS = ((), ("a",), ("\ufffd", "é"), ("\ufffd\ufffd",), ("日本", "<think>", " "))
both = pytest.mark.parametrize("make", [byte_level, byte_fallback])


@both
def test_requests_together(make: Make, count: Any) -> None:
    """Drawn answers with and without stop strings; each is as it is alone."""
    tokenizer = make()
    llm = LLM(thinking_target(tokenizer), max_batch=8, kv_tokens=8 * 256)
    for seed in range(ROUNDS):
        params = [
            SamplingParams(temperature=9.0, seed=seed * 8 + at, logprobs=1, max_tokens=48,
                           stop=STOPS[at % len(STOPS)], ignore_eos=bool(at % 2))
            for at in range(8)
        ]  # fmt: skip
        prompts = [[5 + at, 6] for at in range(8)]
        chunks = list(run := llm.stream(prompts, params))
        done = run.completions()
        for at, answer in enumerate(done):
            assert answer.finish_reason in ("stop", "length"), answer.failure
            own = [chunk for chunk in chunks if chunk.index == at]
            assert "".join(chunk.text for chunk in own) == answer.text
            entries = AnswerLogprobs(tokenizer).push(answer.logprobs or [], answer.text, True)
            assert b"".join(bytes(entry.bytes) for entry in entries) == answer.text.encode()
            if answer.finish_reason == "length":
                assert answer.text == tokenizer.backend_tokenizer.decode(answer.token_ids)
        [alone] = llm.generate([prompts[3]], params[3])
        assert alone.text == done[3].text
    count("answers that are no text", 8 * ROUNDS)

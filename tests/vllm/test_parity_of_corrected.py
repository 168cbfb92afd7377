"""A corrected head is compared with vLLM without its correction, which vLLM does not run."""

from pathlib import Path

import pytest
from corrected_heads import corrected
from tiny import make_drafter, make_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.vllm import parity


def test_the_plain_head_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = make_target(), list[Drafter]()
    head = corrected(make_drafter(target, "p-eagle"))

    def vllm(
        python: Path, drafter: Drafter, target: Target, prompt: list[int], k: int
    ) -> tuple[list[int], Stats]:
        asked.append(drafter)
        plain = LLM(target, make_drafter(target, "p-eagle"), k=k, max_batch=1)
        [answer] = plain.generate([prompt], SamplingParams(max_tokens=parity.MAX_TOKENS))
        return answer.token_ids, answer.stats

    monkeypatch.setattr(parity, "_ask", vllm)
    assert "the same" in parity.compare_with_vllm(Path("python"), head, target, [9, 8, 7])
    assert asked[0].correction is None and head.correction is not None

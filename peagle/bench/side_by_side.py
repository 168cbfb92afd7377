"""Several ways to decode the same prompts, interleaved so that noise affects all alike."""

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.bench.summary import acceptance_row
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.drafter import Drafter


@dataclass(slots=True)
class Contender:
    """One way to decode, and what it took."""

    drafting: Drafting
    drafter: Drafter | None = None
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    outputs: list[list[int]] = field(default_factory=list)
    took: list[float] = field(default_factory=list)  # seconds of each prompt

    def row(self) -> dict[str, Any]:
        """The row as the JSON files have it."""
        tokens = sum(map(len, self.outputs))
        return {
            **self.drafting.row,
            "tokens_per_second": round(tokens / self.seconds, 2),
            **acceptance_row(self.stats),
            "output_tokens": tokens,
            "seconds": round(self.seconds, 3),
        }


def load_contenders(llm: LLM, heads: dict[str, Path]) -> list[Contender]:
    """The target alone, then each head by method; what is drafted is chosen round by round."""
    drafting = [
        Contender(Drafting(method, "auto", lookup=True), llm.load_head(folder))
        for method, folder in heads.items()
    ]
    return [Contender(Drafting()), *drafting]


def compare(
    llm: LLM,
    contenders: list[Contender],
    prompts: list[list[int]],
    params: SamplingParams,
    on_prompt: Callable[[], None] = lambda: None,
) -> None:
    """Decode every prompt with every contender in turn; the order rotates from prompt to prompt."""
    warm_up = SamplingParams(max_tokens=4)
    playing = [(one, llm.use(one.drafter, **one.drafting.options)) for one in contenders]
    for _, used in playing:
        used.generate(prompts[:1], warm_up)
    for number, prompt in enumerate(prompts):
        turn = number % len(playing)
        for contender, used in playing[turn:] + playing[:turn]:
            run = used.stream([prompt], params)
            for _ in run:
                pass
            answer = run.completions()[0]
            contender.seconds += run.seconds
            contender.took.append(run.seconds)
            contender.stats += answer.stats
            contender.outputs.append(answer.token_ids)
        on_prompt()


def identical(contenders: list[Contender]) -> bool:
    """Whether all contenders output the same tokens."""
    return all(contender.outputs == contenders[0].outputs for contender in contenders)


def device_name() -> str:
    """The machine, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found[1] if found else model
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"

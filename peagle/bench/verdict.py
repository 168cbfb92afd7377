"""Time the target alone and with its head side by side, and judge the head."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from peagle.bench.load import Conversations
from peagle.bench.native import side_by_side
from peagle.bench.summary import Result, interval
from peagle.data.chat import prompt_ids
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.shown import mean_length

PROMPTS, MAX_TOKENS = 4, 64  # enough for a verdict, not for a benchmark
MIN_GAIN = 1.05  # a smaller speed-up is noise
TRAINED = 1.3  # acceptance length of a head that has learned its target


@dataclass(frozen=True, slots=True)
class Timing:
    """The head in one setting, and the target alone, on the same prompts one at a time."""

    drafting: Drafting
    acceptance_length: float  # on all prompts
    tokens_per_second: float
    target_tokens_per_second: float
    speed_up_95: list[float] | None = None  # interval, over the prompts; None for a single one

    @property
    def certain(self) -> bool:
        """True when the interval excludes equal speed."""
        edges = self.speed_up_95
        return edges is not None and not edges[0] <= 1 <= edges[1]

    @property
    def speed_up(self) -> float:
        """Times the speed of the target alone."""
        return self.tokens_per_second / self.target_tokens_per_second

    def row(self) -> dict[str, Any]:
        """The timing as the JSON output has it."""
        measured = asdict(self)
        del measured["drafting"]
        return self.drafting.row | measured

    @property
    def worth_it(self) -> bool:
        """A round takes at least one forward of the target, so a speed-up beyond the acceptance
        length is noise."""
        return self.certain and min(self.speed_up, self.acceptance_length) >= MIN_GAIN


def time_head(
    llm: LLM, measured: list[dict[str, Any]], conversations: Conversations, params: SamplingParams
) -> list[Timing]:
    """Time the head in `llm` in every setting of `measured` (rows of `measure_acceptance`), on the
    first turns of the first conversations; nothing when none fits the target's context."""
    fitting = [turns[0] for turns in conversations[:PROMPTS] if _fits(llm, turns[0])]
    if not fitting:
        return []
    lengths = {Drafting.from_row(row): row["acceptance_length"] for row in measured}
    few = replace(params, max_tokens=min(MAX_TOKENS, params.max_tokens))
    alone, *heads = side_by_side(llm, dict.fromkeys(lengths, llm.drafter), fitting, few)
    return [_timing(lengths[head.cell.drafting], head, alone) for head in heads]


def _fits(llm: LLM, prompt: str) -> bool:
    ids = prompt_ids(llm.tokenizer, [{"role": "user", "content": prompt}])
    return len(ids) < llm.target.max_context


def _timing(length: float, head: Result, alone: Result) -> Timing:
    speed, base = (round(one.tokens / one.seconds, 2) for one in (head, alone))
    edges = interval(speed / base, head, alone)
    return Timing(head.cell.drafting, length, speed, base, edges)


def verdict(timings: list[Timing]) -> dict[str, Any]:
    """The best setting, whether it is worth it, and that in one sentence."""
    best = max(timings, key=lambda timing: timing.speed_up)
    return {
        "worth_it": best.worth_it,
        "k": best.drafting.row["k"],
        "max_nodes": best.drafting.row["max_nodes"],
        "speed_up": round(best.speed_up, 2),
        "speed_up_95": best.speed_up_95,
        "sentence": sentence(best),
        "timings": [timing.row() for timing in timings],
    }


def sentence(best: Timing) -> str:
    """A sentence: is the head worth it on these prompts and this machine, and if not, the fix."""
    edges = "" if best.speed_up_95 is None else " ({:.2f}–{:.2f})".format(*best.speed_up_95)
    speed = f"{best.speed_up:.2f} ×{edges} the target alone at {best.drafting}"
    length = f"acceptance length {mean_length(best.acceptance_length)}"
    if not best.certain:
        few = "too few prompts to tell whether it is worth it"
        return f"{few}: {speed} ({length}); peagle bench measures more"
    if best.worth_it:
        return f"worth it: {speed} ({length})"
    advice = "drafting costs more here than it saves: try another K or a smaller head"
    if best.acceptance_length < TRAINED:
        advice = "train it on answers of this target (peagle train --init-from)"
    return f"not worth it: {speed}; {length}: {advice}"

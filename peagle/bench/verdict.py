"""Time the target alone and with its head side by side, and judge the head."""

from dataclasses import replace
from typing import Any

from peagle.bench.load import Conversations
from peagle.bench.native import side_by_side
from peagle.bench.summary import row
from peagle.data.chat import prompt_ids
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.shown import mean_length

PROMPTS, MAX_TOKENS = 4, 64  # enough for a verdict, not for a benchmark
MIN_GAIN = 1.05  # a smaller speed-up is noise
TRAINED = 1.3  # acceptance length of a head that has learned its target


Timing = dict[str, Any]  # a row of `summary.row`, with the acceptance length on all prompts


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
    timings = [row(head, alone) for head in heads]
    return [one | {"acceptance_length": lengths[Drafting.from_row(one)]} for one in timings]


def _fits(llm: LLM, prompt: str) -> bool:
    ids = prompt_ids(llm.tokenizer, [{"role": "user", "content": prompt}])
    return len(ids) < llm.target.max_context


def _certain(timing: Timing) -> bool:
    """True when the interval excludes equal speed."""
    edges = timing["speed_up_95"]
    return edges is not None and not edges[0] <= 1 <= edges[1]


def _worth_it(timing: Timing) -> bool:
    """A round takes at least one forward of the target, so a speed-up beyond the acceptance length
    is noise."""
    return _certain(timing) and min(timing["speed_up"], timing["acceptance_length"]) >= MIN_GAIN


def verdict(timings: list[Timing]) -> dict[str, Any]:
    """The best setting, whether it is worth it, and that in one sentence."""
    best = max(timings, key=lambda timing: timing["speed_up"])
    setting = {name: best[name] for name in ("k", "max_nodes", "speed_up", "speed_up_95")}
    judged = {"worth_it": _worth_it(best), "sentence": sentence(best)}
    return judged | setting | {"timings": timings}


def sentence(best: Timing) -> str:
    """A sentence: is the head worth it on these prompts and this machine, and if not, the fix."""
    edges = "" if best["speed_up_95"] is None else " ({:.2f}–{:.2f})".format(*best["speed_up_95"])
    drafts = Drafting.from_row(best)
    speed = f"{best['speed_up']:.2f} ×{edges} the target alone at {drafts}"
    length = f"acceptance length {mean_length(best['acceptance_length'])}"
    if not _certain(best):
        few = "too few prompts to tell whether it is worth it"
        return f"{few}: {speed} ({length}); peagle bench measures more"
    if _worth_it(best):
        return f"worth it: {speed} ({length})"
    advice = "drafting costs more here than it saves: try another K or a smaller head"
    if best["acceptance_length"] < TRAINED:
        advice = "train it on answers of this target (peagle train --init-from)"
    return f"not worth it: {speed}; {length}: {advice}"

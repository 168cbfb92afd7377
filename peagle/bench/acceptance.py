"""Acceptance length of a head on a set of prompts: every turn, through the chat template."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats


def measure_acceptance(
    llm: LLM,
    conversations: list[list[str]],  # user turns
    params: SamplingParams,
    on_done: Callable[[int], None] = lambda answered: None,
) -> dict[str, Any]:
    """Answer every turn of every conversation (later turns see the target's own earlier answers).

    Returns K, temperature, acceptance length, per-position acceptance, rounds, output tokens, and
    how many turns were left out because their prompt fills the target's context.
    """
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    total, output_tokens, skipped = Stats(), 0, 0
    for turn in range(max(map(len, conversations))):
        alive = [i for i, turns in enumerate(conversations) if turn < len(turns)]
        for i in alive:
            histories[i].append({"role": "user", "content": conversations[i][turn]})
        prompts = [prompt_ids(llm.tokenizer, histories[i]) for i in alive]
        room = llm.target.max_context - 1
        fitting = [(i, ids) for i, ids in zip(alive, prompts, strict=True) if len(ids) <= room]
        skipped += len(alive) - len(fitting)
        run = llm.stream([ids for _, ids in fitting], replace(params))
        done = 0
        for _ in run:
            finished = sum(r.finish_reason is not None for r in run.requests)
            on_done(finished - done)
            done = finished
        on_done(len(fitting) - done)
        for (i, _), answer in zip(fitting, run.completions(), strict=True):
            histories[i].append({"role": "assistant", "content": answer.text})
            total += answer.stats
            output_tokens += len(answer.token_ids)
    return {
        "k": llm.k,
        "temperature": params.temperature,
        "acceptance_length": round(total.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in total.accepted_per_position],
        "rounds": total.rounds,
        "output_tokens": output_tokens,
        "skipped_turns": skipped,
    }

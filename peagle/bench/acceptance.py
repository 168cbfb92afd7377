"""Acceptance length of a head on a set of prompts: every turn, through the chat template."""

import asyncio
from typing import Any

from peagle.bench.load import Conversations, OnTurns, Played, closed_loop
from peagle.bench.native import Native
from peagle.bench.summary import acceptance_row
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams


def measure_acceptance(
    llm: LLM,
    conversations: Conversations,
    params: SamplingParams,
    on_turns: OnTurns = lambda turns: None,
) -> dict[str, Any]:
    """Answer every turn of every conversation (later turns see the target's own earlier answers).

    Returns what is drafted, temperature, what was accepted, rounds, output tokens, and how many
    turns were left out because their prompt fills the target's context. Raises InputError for a
    target without a chat template.
    """
    prompt_ids(llm.tokenizer, [{"role": "user", "content": conversations[0][0]}])

    async def play() -> Played:
        async with Native(llm, params) as native:
            return await closed_loop(conversations, llm.max_batch, native, on_turns)

    played = asyncio.run(play())
    answered = [sample for sample in played.samples if sample.error is None]
    return {
        "method": llm.method,
        "k": llm.k if llm.nodes is None else None,
        "max_nodes": llm.nodes,
        "lookup": llm.lookup,
        "temperature": params.temperature,
        **acceptance_row(played.drafting),
        "rounds": played.drafting.rounds,
        "output_tokens": sum(sample.tokens for sample in answered),
        "skipped_turns": sum(map(len, conversations)) - len(answered),
    }

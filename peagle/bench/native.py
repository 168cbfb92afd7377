"""The engine in this process, asked as a server is."""

import asyncio
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from peagle.bench.load import Answer, AskError, Conversations, Message, OnTurns, Played, closed_loop
from peagle.bench.run import alternate
from peagle.bench.summary import Cell, Result, acceptance_row
from peagle.data.chat import prompt_ids
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request, Stats
from peagle.errors import InputError
from peagle.model.drafter import Drafter


@dataclass(slots=True)
class _Asked:
    """A request that runs."""

    request: Request
    ended: asyncio.Future[None]
    first: float | None = None  # when its first token came


class Native(AbstractAsyncContextManager["Native"]):
    """Answers turns: `async with Native(llm, params) as native: await native.ask(messages)`.

    The engine runs in the event loop itself, a step at a time, while requests are open.
    """

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm = llm
        self.params = params
        self.stats = Stats()
        self._seeds = count(params.seed or 0)  # one for each answer
        self._engine = llm.engine
        self._open = list[_Asked]()
        self._pump: asyncio.Task[None] | None = None

    async def __aexit__(self, *_: object) -> None:
        for asked in self._open:  # left early: the engine is free for others
            self._engine.cancel(asked.request)
        if self._pump is not None:
            self._pump.cancel()

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AskError when it does not fit or fails."""
        try:
            ids = self.llm.prompt_ids(self.ids(messages))
            [request] = self.llm.make_requests(ids, replace(self.params, seed=next(self._seeds)))
        except InputError as error:
            raise AskError(str(error)) from error
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._engine.add(request)
        self._open.append(asked)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        await asked.ended
        self.stats += request.stats
        if request.failure is not None or asked.first is None:
            raise AskError(request.failure or "no token was generated")
        output = tuple(request.output)
        return Answer(request.text.text, output, len(output), asked.first)

    async def drafting(self) -> Stats:
        """Statistics of the answers so far."""
        return self.stats

    def ids(self, messages: list[Message]) -> list[int]:
        """The prompt of a conversation."""
        return prompt_ids(self.llm.tokenizer, messages)

    async def _run(self) -> None:
        """Step the engine until no request is open."""
        try:
            while self._open:
                self._engine.step()
                self._notice(time.perf_counter())
                await asyncio.sleep(0)
        except Exception as error:
            for asked in self._open:
                asked.ended.set_exception(error)

    def _notice(self, now: float) -> None:
        """Record first tokens, and close requests that have finished."""
        for asked in self._open:
            request = asked.request
            request.emitted = []
            if asked.first is None and len(request.tokens) > request.prompt_length:
                asked.first = now
            if request.finish_reason is not None:
                asked.ended.set_result(None)
        self._open = [asked for asked in self._open if asked.request.finish_reason is None]


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
        **llm.drafting.row,
        "temperature": params.temperature,
        **acceptance_row(played.drafting),
        "rounds": played.drafting.rounds,
        "output_tokens": sum(sample.tokens for sample in answered),
        "skipped_turns": sum(map(len, conversations)) - len(answered),
    }


def side_by_side(
    llm: LLM,
    drafters: Mapping[Drafting, Drafter | None],
    prompts: list[str],
    params: SamplingParams,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Answer prompts, one at a time, with the target alone and with each drafting in turn."""
    ways = {Drafting(): None, **drafters}
    used = {way: llm.use(drafter, **way.options) for way, drafter in ways.items()}
    results = [Result(Cell(way, 1, params.temperature)) for way in ways]
    turns = [[prompt] for prompt in prompts]
    alternate(results, lambda cell: Native(used[cell.drafting], params), turns, on_prompt)
    return results


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

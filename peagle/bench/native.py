"""The engine in this process as a client of a load, and measurements with it."""

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

from peagle.bench.load import Answer, AnswerError, Conversations, Message, OnTurns
from peagle.bench.run import Load, by_conversation, play, play_once
from peagle.bench.summary import Cell, Result, acceptance_row
from peagle.data.chat import prompt_ids
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request, Stats
from peagle.errors import InputError
from peagle.model.drafter import Drafter


@dataclass(slots=True)
class _OpenRequest:
    """A request whose answer is awaited."""

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
        self._open = list[_OpenRequest]()
        self._pump: asyncio.Task[None] | None = None

    async def __aexit__(self, *_: object) -> None:
        for each in self._open:  # left early: the engine is free for others
            self._engine.cancel(each.request)
        if self._pump is not None:
            self._pump.cancel()

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AnswerError when it does not fit or fails."""
        try:
            ids = self.llm.prompt_ids(self.ids(messages))
            [request] = self.llm.make_requests(ids, replace(self.params, seed=next(self._seeds)))
        except InputError as error:
            raise AnswerError(str(error)) from error
        opened = _OpenRequest(request, asyncio.get_running_loop().create_future())
        self._engine.add(request)
        self._open.append(opened)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        await opened.ended
        self.stats += request.stats
        if request.failure is not None or opened.first is None:
            raise AnswerError(request.failure or "no token was generated")
        output = tuple(request.output)
        return Answer(request.text.text, output, len(output), opened.first)

    async def drafting(self) -> Stats:
        """Statistics of the answers so far."""
        return self.stats

    def ids(self, messages: list[Message]) -> list[int]:
        """The prompt of a conversation; benchmarks with random weights override it."""
        return prompt_ids(self.llm.tokenizer, messages)

    async def _run(self) -> None:
        """Step the engine until no request is open."""
        try:
            while self._open:
                self._engine.step()
                self._notice(time.perf_counter())
                await asyncio.sleep(0)
        except Exception as error:
            for each in self._open:
                each.ended.set_exception(error)

    def _notice(self, now: float) -> None:
        """Record first tokens, and close requests that have finished."""
        for each in self._open:
            request = each.request
            request.emitted = []
            if each.first is None and len(request.tokens) > request.prompt_length:
                each.first = now
            if request.finish_reason is not None:
                each.ended.set_result(None)
        self._open = [each for each in self._open if each.request.finish_reason is None]


def measure_acceptance(
    llm: LLM,
    conversations: Conversations,
    params: SamplingParams,
    on_turns: OnTurns = lambda turns: None,
) -> dict[str, Any]:
    """Answer every turn of every conversation (later turns see the target's earlier answers).

    Returns the cell, what was accepted, rounds, output tokens, and how many turns were left out
    because their prompt fills the target's context. Raises InputError for a target without a chat
    template.
    """
    prompt_ids(llm.tokenizer, [{"role": "user", "content": conversations[0][0]}])

    cell = Cell(llm.drafting, llm.max_batch, params.temperature)
    load = Load(Result(cell), conversations)
    played = play_once(load, lambda _, seed: Native(llm, params), on_turns=on_turns)
    answered = [sample for sample in played.samples if sample.error is None]
    return {
        **cell.row,
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
    on_load: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Answer prompts, one at a time, with the target alone and with each drafting in turn."""
    ways = {Drafting(): None, **drafters}
    used = {way: llm.use(drafter, **way.options) for way, drafter in ways.items()}
    results = [Result(Cell(way, 1, params.temperature)) for way in ways]
    loads = by_conversation(results, [[prompt] for prompt in prompts])
    play(loads, lambda cell, _: Native(used[cell.drafting], params), on_load=on_load)
    return results


def device_name() -> str:
    """The machine, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    model = found[1] if found else platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"

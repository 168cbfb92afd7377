"""Our engine in this process, asked as a server is."""

import asyncio
import time
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType

from peagle.bench.load import Answer, AskError, Drafting, Message
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request, Stats
from peagle.errors import InputError


@dataclass(slots=True)
class _Asked:
    """A request that runs."""

    request: Request
    ended: asyncio.Future[None]
    first: float | None = None


class Native:
    """Answers turns: `async with Native(llm, params) as native: await native.ask(messages)`.

    The engine is stepped in the event loop itself, between the turns of whoever asks.
    """

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm, self.params, self.stats = llm, params, Stats()
        self._seeds = count(params.seed or 0)  # an answer's own
        self._engine, self._open, self._wake = llm.engine, list[_Asked](), asyncio.Event()

    async def __aenter__(self) -> "Native":
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._pump.cancel()
        for asked in self._open:  # left early: the engine is free for others
            self._engine.cancel(asked.request)

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AskError when it does not fit or fails."""
        try:
            ids = self.llm.prompt_ids(self.ids(messages))
            request = self.llm.requests(ids, replace(self.params, seed=next(self._seeds)))[0]
            self.llm.prepare(request)
        except InputError as error:
            raise AskError(str(error)) from error
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self.prepare(request)
        self._engine.add(request)
        self._open.append(asked)
        self._wake.set()
        await asked.ended
        self.stats += request.stats
        if request.failure is not None or asked.first is None:
            raise AskError(request.failure or "no token was said")
        ids = request.output
        return Answer(request.text.text, len(ids), asked.first, tuple(ids))

    async def drafting(self) -> Drafting:
        """Since it was made."""
        stats = self.stats
        return Drafting(stats.rounds, sum(stats.accepted), [float(n) for n in stats.accepted])

    def ids(self, messages: list[Message]) -> list[int]:
        """What the engine is asked."""
        return prompt_ids(self.llm.tokenizer, messages)

    def prepare(self, request: Request) -> None:
        """Before a request is queued: for those who judge otherwise."""

    async def _run(self) -> None:
        try:
            while True:
                if self._engine.idle:
                    self._wake.clear()
                    await self._wake.wait()
                self._engine.step()
                self._look(time.perf_counter())
                await asyncio.sleep(0)
        except Exception as error:
            for asked in self._open:
                asked.ended.set_exception(error)
            raise

    def _look(self, now: float) -> None:
        for asked in self._open:
            request = asked.request
            request.emitted = []
            if asked.first is None and len(request.tokens) > request.prompt_length:
                asked.first = now
            if request.finish_reason is not None:
                asked.ended.set_result(None)
        self._open = [asked for asked in self._open if asked.request.finish_reason is None]

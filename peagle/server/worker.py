"""Jobs for the engine thread, admitted in the event loop: capacity and deadlines."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from anyio import CapacityLimiter, to_thread

from peagle.engine.llm import LLM
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.server.engine_thread import FAILED, EngineThread, Job
from peagle.server.metrics import Metrics, RequestMetrics
from peagle.server.responses import ApiError

T = TypeVar("T")
log = logging.getLogger(__name__)
ENDING = "the server ends: use another one"
TOKENISERS = 2  # threads that tokenise prompts: each may take 100 MB
COMPILERS = 1  # threads that compile grammars


class Worker:
    """Has requests answered by an engine in a thread. All methods are for the event loop."""

    def __init__(self, llm: LLM, metrics: Metrics, max_queue: int, max_seconds: float) -> None:
        self.llm = llm
        self.metrics = metrics
        self.too_late = f"the answer has not begun in time, {max_seconds:g} seconds: try again"
        self.capacity = llm.engine.settings.max_batch + max_queue
        self.draining = False
        self._max_seconds = max_seconds
        self.thread = EngineThread(llm.engine, metrics, self._fail)
        self._tokenisers = CapacityLimiter(TOKENISERS)
        self._compilers = CapacityLimiter(COMPILERS)
        self._jobs = set[Job]()
        self.cancelled = False  # jobs in preparation are not admitted any more

    async def stop(self) -> None:
        """Cancel all requests and end the thread."""
        self.cancel_all()
        await self.thread.stop()

    @property
    def failed(self) -> bool:
        """Whether the engine has failed."""
        return self.thread.failed

    @property
    def state(self) -> Literal["ok", "draining", "failed"]:
        """Whether requests are taken."""
        if self.failed:
            return "failed"
        return "draining" if self.draining else "ok"

    @property
    def open(self) -> int:
        """The number of requests that run or wait."""
        return sum(job.left for job in self._jobs)

    async def submit(
        self,
        count: int,
        make: Callable[[], list[Request]],
        copies: int,
        constrained: bool,
        traced: bool,
    ) -> Job:
        """Admit `count` requests, `copies` of each prompt; all or none. `make` makes them in
        another thread, once there is room for them; `constrained` where one has a grammar. Their
        verified drafts are kept for the client if they are `traced`.

        Raises what `make` raises, InputError when a request can never run, ApiError when there is
        no room for them.
        """
        self._check_room(count, "prompt" if copies == 1 else "n")
        job = Job(count, copies, traced, self._jobs.discard)
        self._jobs.add(job)
        try:
            # Compiling a grammar may take seconds, which other requests do not wait for.
            limiter = self._compilers if constrained else self._tokenisers
            requests = await to_thread.run_sync(self._prepare, make, limiter=limiter)
            if self.cancelled or self.failed:
                raise ApiError(503, ENDING)
        except BaseException:
            self._jobs.discard(job)
            raise
        job.tracks = [RequestMetrics(request, job.arrived) for request in requests]
        self.thread.post(self.thread.admit, job)
        expire = partial(self.thread.post, self.thread.expire, job, self.too_late)
        job.deadline = asyncio.get_running_loop().call_later(self._max_seconds, expire)
        return job

    async def tokenise(self, work: Callable[[], T]) -> T:
        """The result of `work`, which makes token ids of texts, in one of a few threads."""
        return await to_thread.run_sync(work, limiter=self._tokenisers)

    def _prepare(self, make: Callable[[], list[Request]]) -> list[Request]:
        try:
            return make()
        except (InputError, ApiError):
            raise
        except BaseException as error:  # a panic in native code is no Exception
            log.exception("a request could not be prepared")
            why = "the request could not be prepared: see the server's log"
            raise ApiError(500, why) from error

    def cancel(self, job: Job) -> None:
        """End a job's requests as they are."""
        self.thread.post(self.thread.cancel, job)

    def cancel_all(self) -> None:
        """End all requests as they are. (A signal's handler may call it, too.)"""
        self.cancelled = True
        self.thread.post(self.thread.cancel)

    def _fail(self) -> None:
        for job in list(self._jobs):
            job.receive(None)

    def _check_room(self, count: int, field: str | None = None) -> None:
        if self.failed:
            raise ApiError(503, FAILED)
        if self.draining:
            raise ApiError(503, ENDING)
        if count > self.capacity:
            why = f"{field}: {count} answers at once, at most {self.capacity}; ask for fewer"
            raise ApiError(400, why, param=field)
        if self.open + count > self.capacity:
            why = f"{self.open} requests run or wait, at most {self.capacity}: try again"
            raise ApiError(429, why, headers={"retry-after": "1"})

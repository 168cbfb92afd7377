"""The thread that owns the engine, and how the event loop speaks with it.

Everything that the event loop asks goes through one queue, in order; everything that the engine
says comes back with `call_soon_threadsafe`. While a request runs only the thread touches it; once
it has ended, only the event loop does.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from peagle.engine.llm import LLM
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.server.errors import ApiError
from peagle.server.jobs import FAILED, Drafting, Event, Job, Said, Visit
from peagle.server.metrics import Metrics, Track

T = TypeVar("T")
log = logging.getLogger(__name__)
ENDING = "the server ends: ask another one"
TOO_LATE = "the answer has not begun in time"
MAKERS = 2  # threads that tokenise prompts: each may take 100 MB
COMPILERS = 1  # threads that compile grammars


class Worker:
    """Runs an engine in a thread. Public methods are for the event loop."""

    def __init__(self, llm: LLM, metrics: Metrics, max_queue: int, max_seconds: float) -> None:
        self.llm, self.metrics, self.max_seconds = llm, metrics, max_seconds
        self.engine = llm.engine
        self.capacity = self.engine.settings.max_batch + max_queue
        self.draining, self.failed = False, False
        self._over = False  # nothing that is being prepared is admitted any more
        # Threads that tokenise, and threads that compile grammars.
        self._makers, self._compilers = CapacityLimiter(MAKERS), CapacityLimiter(COMPILERS)
        self._jobs = set[Job]()  # the event loop's, as is:
        self._guest: Visit | None = None
        self._running = list[Job]()  # the thread's, as are:
        self._visit: Visit | None = None
        self._held = list[Job]()  # until the visit is over
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Have the running event loop hear what the engine says."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; what still runs is cancelled."""
        self.cancel_all()
        self._asked.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def open(self) -> int:
        """Requests that run or wait, and a visit."""
        return sum(job.left for job in self._jobs) + (self._guest is not None)

    async def submit(self, count: int, make: Callable[[], list[Request]], copies: int = 1) -> Job:
        """Have `count` requests answered, `copies` of each prompt; all or none. `make` makes them,
        in another thread, once there is room for them.

        Raises what `make` raises, InputError when one of them can never run, ApiError when there is
        no room for them.
        """
        self._check_room(count, "prompt" if copies == 1 else "n")
        job = Job(count, copies)
        self._jobs.add(job)
        try:
            requests = await self.tokenise(make)
            await self._prepare(requests)
        except BaseException:
            self._forget(job)
            raise
        job.tracks = [Track(request, job.arrived) for request in requests]
        self._asked.put(partial(self._admit, job))
        expire = partial(self._asked.put, partial(self._expire, job))
        job.limit = self._loop.call_later(self.max_seconds, expire)
        await job.admitted
        return job

    async def tokenise(self, work: Callable[[], T]) -> T:
        """What `work` returns, which makes token ids of texts; run in one of a few threads."""
        return await to_thread.run_sync(work, limiter=self._makers)

    async def _prepare(self, requests: list[Request]) -> None:
        """Make ready what requests need, off the event loop and the engine's thread: compiling a
        grammar may take seconds, which other requests do not wait for."""

        def prepare() -> None:
            for request in requests:
                self.llm.prepare(request)

        constrained = any(request.params.constraint for request in requests)
        try:
            await to_thread.run_sync(prepare, limiter=self._compilers if constrained else None)
        except (InputError, asyncio.CancelledError):
            raise
        except BaseException as error:  # a panic in native code is no Exception
            log.exception("a request could not be prepared")
            why = "the request could not be prepared: see the server's log"
            raise ApiError(500, why) from error
        if self._over or self.failed:
            raise ApiError(503, ENDING)

    def cancel(self, job: Job) -> None:
        """End a job's requests as they are."""
        self._asked.put(partial(self._cancel, job))

    def visit(self, steps: Generator[Event, None, None]) -> AsyncIterator[Event]:
        """Have `steps` run once what is asked for so far has been answered; requests that come
        until their end wait for it. Left early, the steps are closed. One visit at a time.

        Raises ApiError when there is no room for one; what it returns raises one for a step that
        fails.
        """
        self._check_room(1)
        if self._guest is not None:
            raise ApiError(429, "a race is on: try again", headers={"retry-after": "5"})
        visit = self._guest = Visit(steps)
        self._asked.put(partial(self._receive, visit))
        return self._heard(visit)

    async def _heard(self, visit: Visit) -> AsyncIterator[Event]:
        try:
            while (told := await visit.news.get()) is not None:
                if isinstance(told, ApiError):
                    raise told
                yield told
        finally:
            self._asked.put(partial(self._dismiss, visit))

    def cancel_all(self) -> None:
        """End all requests as they are. (A signal's handler may call it, too.)"""
        self._over = True
        for job in list(self._jobs):
            self.cancel(job)
        if self._guest is not None:
            self._asked.put(partial(self._dismiss, self._guest))

    def _check_room(self, count: int, field: str | None = None) -> None:
        if self.failed:
            raise ApiError(503, FAILED)
        if self.draining:
            raise ApiError(503, ENDING)
        if count > self.capacity:
            why = f"{count} answers at once: at most {self.capacity}, ask for fewer"
            raise ApiError(400, why, param=field)
        if self.open + count > self.capacity:
            why = f"{self.open} requests run or wait, at most {self.capacity}: try again"
            raise ApiError(429, why, headers={"retry-after": "1"})

    # ---- called by the thread, in the event loop

    def _tell_admitted(self, job: Job, error: Exception | None) -> None:
        if error is not None:
            self._forget(job)
        if not job.admitted.done():
            job.admitted.set_result(None) if error is None else job.admitted.set_exception(error)

    def _tell(self, news: list[tuple[Job, Said]]) -> None:
        for job, said in news:
            job.news.put_nowait(said)
            job.left -= said.ended is not None
            if not job.left:
                self._forget(job)

    def _forget(self, job: Job) -> None:
        self._jobs.discard(job)
        if job.limit is not None:
            job.limit.cancel()

    def _tell_failed(self) -> None:
        for job in self._jobs:
            job.news.put_nowait(None)
            if not job.admitted.done():
                job.admitted.set_exception(ApiError(500, FAILED))
        for job in list(self._jobs):
            self._forget(job)
        if self._guest is not None:
            self._tell_guest(self._guest, ApiError(500, FAILED))

    def _tell_guest(self, visit: Visit, told: Event | ApiError | None) -> None:
        visit.news.put_nowait(told)
        if not isinstance(told, dict) and visit is self._guest:
            self._guest = None

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._take():
                if not self.engine.idle:
                    self.engine.step()
                elif self._visit is not None:
                    self._step(self._visit)
                self._report()
        except BaseException:  # a panic in native code is no Exception
            # The engine is in a state that nobody knows: nothing may go on with it.
            self.failed = True
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._tell_failed)

    def _take(self) -> bool:
        """Do what was asked for, waiting for it while there is nothing else to do; False at the
        end."""
        wait = self.engine.idle and self._visit is None
        while True:
            try:
                asked = self._asked.get(block=wait)
            except queue.Empty:
                return True
            if asked is None:
                return False
            asked()
            wait = False

    def _admit(self, job: Job) -> None:
        if self._visit is not None:
            self._held.append(job)
            return
        self.engine.add(*job.requests)
        self._running.append(job)
        self._loop.call_soon_threadsafe(self._tell_admitted, job, None)

    def _cancel(self, job: Job) -> None:
        self._refuse_held(job, ApiError(503, ENDING))
        for request in job.requests if job in self._running else ():
            self.engine.cancel(request)

    def _refuse_held(self, job: Job, why: ApiError) -> None:
        if job in self._held:
            self._held.remove(job)
            self._loop.call_soon_threadsafe(self._tell_admitted, job, why)

    def _receive(self, visit: Visit) -> None:
        self._visit = visit

    def _step(self, visit: Visit) -> None:
        told: Event | ApiError | None = None
        try:
            told = next(visit.steps, None)
        except InputError as wrong:
            told = ApiError(400, str(wrong))
        except Exception:  # what it touched is put back; a panic ends the server
            log.exception("a visit failed")
            told = ApiError(500, "it failed: see the server's log")
        if isinstance(told, dict):
            self._loop.call_soon_threadsafe(self._tell_guest, visit, told)
        else:
            self._dismiss(visit, told)

    def _dismiss(self, visit: Visit, told: ApiError | None = None) -> None:
        if visit is not self._visit:
            return  # it has ended
        visit.steps.close()
        self._visit, held, self._held = None, self._held, []
        for job in held:
            self._admit(job)
        self._loop.call_soon_threadsafe(self._tell_guest, visit, told)

    def _expire(self, job: Job) -> None:
        """The time is over: what has been said is the answer, and nothing is none."""
        late = f"{TOO_LATE}, which is {self.max_seconds:g} seconds: try again"
        self._refuse_held(job, ApiError(503, late, headers={"retry-after": "1"}))
        for request in job.requests if job in self._running else ():
            if request.finish_reason is None and not request.output:
                request.failure = late
            self.engine.cancel(request, "length" if request.output else "error")

    def _report(self) -> None:
        news = list[tuple[Job, Said]]()
        for job in self._running:
            for track in job.tracks:
                request = track.request
                if track.ended:
                    continue
                self.metrics.observe(track)
                track.ended = request.finish_reason is not None
                emitted = self.engine.fetch(request)
                if emitted or track.ended:
                    ended, stats = request if track.ended else None, request.stats
                    fares = Drafting(len(request.output), stats.rounds, sum(stats.accepted))
                    news.append((job, Said(request.index, emitted, ended, fares)))
        self._running = [job for job in self._running if not all(t.ended for t in job.tracks)]
        if news:
            self._loop.call_soon_threadsafe(self._tell, news)

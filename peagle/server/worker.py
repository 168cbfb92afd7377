"""The thread that owns the engine, and how the event loop talks to it.

The event loop asks through one queue, in order; the thread answers with `call_soon_threadsafe`.
While a request runs only the thread touches it; once it has ended, only the event loop does.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from peagle.engine.llm import LLM
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.server.errors import ApiError
from peagle.server.jobs import FAILED, Drafting, Event, ExclusiveJob, Job, Update
from peagle.server.metrics import Metrics, Track

T = TypeVar("T")
log = logging.getLogger(__name__)
ENDING = "the server ends: ask another one"
TOO_LATE = "the answer has not begun in time"
TOKENISERS = 2  # threads that tokenise prompts: each may take 100 MB
COMPILERS = 1  # threads that compile grammars


class Worker:
    """Runs an engine in a thread. Public methods are for the event loop."""

    def __init__(self, llm: LLM, metrics: Metrics, max_queue: int, max_seconds: float) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.metrics = metrics
        self.max_seconds = max_seconds
        self.capacity = self.engine.settings.max_batch + max_queue
        self.draining = False
        self.failed = False
        self._late = f"{TOO_LATE}, which is {max_seconds:g} seconds: try again"
        self._tokenisers = CapacityLimiter(TOKENISERS)
        self._compilers = CapacityLimiter(COMPILERS)
        # The event loop's:
        self._jobs = set[Job]()
        self._cancelled = False  # nothing that is being prepared is admitted any more
        self._exclusive: ExclusiveJob | None = None
        self._shared = asyncio.Event()  # set while there is no exclusive job
        self._shared.set()
        # The thread's:
        self._running = list[tuple[Job, Track]]()
        self._alone: ExclusiveJob | None = None
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; it reports to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; what still runs is cancelled."""
        self.cancel_all()
        self._asked.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def open(self) -> int:
        """The number of requests that run or wait, and of exclusive jobs."""
        return sum(job.left for job in self._jobs) + (self._exclusive is not None)

    async def submit(
        self, count: int, make: Callable[[], list[Request]], copies: int, constrained: bool
    ) -> Job:
        """Have `count` requests answered, `copies` of each prompt; all or none. `make` makes them,
        in another thread, once there is room for them; `constrained` where one has a grammar.

        Raises what `make` raises, InputError when one of them can never run, ApiError when there is
        no room for them.
        """
        self._check_room(count, "prompt" if copies == 1 else "n")
        job = Job(count, copies)
        self._jobs.add(job)
        try:
            # Compiling a grammar may take seconds, which other requests do not wait for.
            limiter = self._compilers if constrained else self._tokenisers
            requests = await to_thread.run_sync(self._prepare, make, limiter=limiter)
            deadline = self._loop.time() + self.max_seconds
            await self._wait_for_exclusive_job(deadline)
        except BaseException:
            self._forget(job)
            raise
        job.tracks = [Track(request, job.arrived) for request in requests]
        self._asked.put(partial(self._admit, job))
        job.limit = self._loop.call_at(deadline, self._asked.put, partial(self._expire, job))
        return job

    async def tokenise(self, work: Callable[[], T]) -> T:
        """What `work` returns, which makes token ids of texts; run in one of a few threads."""
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

    async def _wait_for_exclusive_job(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._shared.wait()
        except TimeoutError as error:
            raise ApiError(503, self._late, headers={"retry-after": "1"}) from error
        if self._cancelled or self.failed:
            raise ApiError(503, ENDING)

    def cancel(self, job: Job) -> None:
        """End a job's requests as they are."""
        self._asked.put(partial(self._cancel, job))

    def run_exclusively(self, steps: Generator[Event, None, None]) -> AsyncGenerator[Event]:
        """Have `steps` run once the requests so far have been answered; requests that come until
        their end wait for it. Left early, the steps are closed. One such job at a time.

        Raises ApiError when there is no room for one; what it returns raises one for a step that
        fails.
        """
        self._check_room(1)
        if self._exclusive is not None:
            raise ApiError(429, "a race is on: try again", headers={"retry-after": "5"})
        job = self._exclusive = ExclusiveJob(steps)
        self._shared.clear()
        self._asked.put(partial(self._begin, job))
        return self._events(job)

    async def _events(self, job: ExclusiveJob) -> AsyncGenerator[Event]:
        try:
            while (event := await job.events.get()) is not None:
                if isinstance(event, ApiError):
                    raise event
                yield event
        finally:
            self._asked.put(partial(self._end, job))

    def cancel_all(self) -> None:
        """End all requests as they are. (A signal's handler may call it, too.)"""
        self._cancelled = True
        self._asked.put(self._cancel)
        if self._exclusive is not None:
            self._asked.put(partial(self._end, self._exclusive))

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

    # ---- called in the event loop, by the thread

    def _receive(self, updates: list[tuple[Job, Update]]) -> None:
        for job, update in updates:
            job.received.put_nowait(update)
            job.left -= update.ended
            if not job.left:
                self._forget(job)

    def _forget(self, job: Job) -> None:
        self._jobs.discard(job)
        if job.limit is not None:
            job.limit.cancel()

    def _receive_event(self, job: ExclusiveJob, event: Event | ApiError | None) -> None:
        job.events.put_nowait(event)
        if not isinstance(event, dict):
            self._exclusive = None
            self._shared.set()

    def _receive_failure(self) -> None:
        for job in list(self._jobs):
            job.received.put_nowait(None)
            self._forget(job)
        if self._exclusive is not None:
            self._receive_event(self._exclusive, ApiError(500, FAILED))

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._take():
                if not self.engine.idle:
                    self.engine.step()
                elif self._alone is not None:
                    self._step(self._alone)
                self._report()
        except BaseException:  # a panic in native code is no Exception
            # The engine's state is unknown: nothing may go on with it.
            self.failed = True
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._receive_failure)

    def _take(self) -> bool:
        """Do what was asked for, waiting for it while there is nothing else to do; False at the
        end."""
        wait = self.engine.idle and self._alone is None
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
        self.engine.add(*job.requests)
        self._running += [(job, track) for track in job.tracks]

    def _cancel(self, job: Job | None = None) -> None:
        """Of one job, or of all that run."""
        for running, track in self._running:
            if job in (running, None):
                self.engine.cancel(track.request)

    def _expire(self, job: Job) -> None:
        """The time is over: what was emitted is the answer; without any the request fails."""
        for request in job.requests:
            if request.finish_reason is None and not request.output:
                request.failure = self._late
            self.engine.cancel(request, "length" if request.output else "error")

    def _report(self) -> None:
        updates = list[tuple[Job, Update]]()
        for job, track in self._running:
            request = track.request
            stats = request.stats
            self.metrics.observe(track)
            chunks = self.engine.fetch(request)
            if chunks or track.ended:
                drafting = Drafting(
                    len(request.output),
                    stats.rounds,
                    stats.drafted,
                    sum(stats.accepted),
                    stats.accepted_from_lookup,
                    stats.forwards,
                )
                updates.append((job, Update(request, chunks, track.ended, drafting)))
        if updates:
            self._running = [(job, track) for job, track in self._running if not track.ended]
            self._loop.call_soon_threadsafe(self._receive, updates)

    def _begin(self, job: ExclusiveJob) -> None:
        self._alone = job

    def _step(self, job: ExclusiveJob) -> None:
        event: Event | ApiError | None
        try:
            event = next(job.steps, None)
        except InputError as wrong:
            event = ApiError(400, str(wrong))
        except Exception:  # the steps put back what they touched; a panic ends the server
            log.exception("an exclusive job failed")
            event = ApiError(500, "it failed: see the server's log")
        if isinstance(event, dict):
            self._loop.call_soon_threadsafe(self._receive_event, job, event)
        else:
            self._end(job, event)

    def _end(self, job: ExclusiveJob, event: ApiError | None = None) -> None:
        if job is self._alone:  # it may have ended already
            job.steps.close()
            self._alone = None
            self._loop.call_soon_threadsafe(self._receive_event, job, event)

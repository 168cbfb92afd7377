"""Jobs, which the event loop admits, and the thread that owns the engine and runs them.

The event loop posts calls to one queue, and the thread runs them in order. The thread hands results
to the jobs with `call_soon_threadsafe`. While a request runs only the thread touches it; after its
end, only the event loop does.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from anyio import CapacityLimiter, to_thread

from peagle.engine.llm import LLM
from peagle.engine.request import Chunk, Request, Stats
from peagle.errors import InputError
from peagle.server.metrics import Metrics, RequestMetrics, Verified
from peagle.server.responses import ApiError

T = TypeVar("T")
log = logging.getLogger(__name__)
Event = dict[str, Any]
FAILED = "the engine has failed: the server ends, start it again"
ENDING = "the server ends: use another one"


class Update(NamedTuple):
    """The output of one round for a request. Until it has `ended`, only its constants may be
    read."""

    request: Request
    chunks: list[Chunk]
    ended: bool
    tokens: int  # of the output so far
    stats: Stats
    verified: list[Verified]  # empty where the job is not traced


@dataclass(slots=True, eq=False)
class Job:
    """The requests of one call: `copies` answers to each of its prompts. It counts before they are
    made."""

    left: int  # requests that have not ended
    copies: int
    traced: bool  # its client asks for verified drafts
    cancelled: bool = False  # its requests are to end as they are
    arrived: float = field(default_factory=time.monotonic)
    tracks: list[RequestMetrics] = field(default_factory=list)
    # None: the engine failed.
    updates: asyncio.Queue[Update | None] = field(default_factory=asyncio.Queue)

    @property
    def requests(self) -> list[Request]:
        return [track.request for track in self.tracks]


class Worker:
    """Has requests answered by an engine in a thread of its own. The event loop calls the public
    methods; the thread runs what they post."""

    def __init__(self, llm: LLM, metrics: Metrics, max_queue: int, max_seconds: float) -> None:
        self.metrics = metrics
        self.too_late = f"the answer has not begun in time, {max_seconds:g} seconds: try again"
        self.capacity = llm.engine.settings.max_batch + max_queue
        self.draining = False
        self.cancelled = False  # nothing is admitted any more, and what runs ends as it is
        self.failed = False  # the engine
        self._max_seconds = max_seconds
        self._tokenisers = CapacityLimiter(2)  # threads: each may take 100 MB
        self._compilers = CapacityLimiter(1)
        self._known = deque[str](maxlen=8)  # the newest forms: the engine keeps their grammars
        self._jobs = set[Job]()
        self._engine = llm.engine
        self._running = list[tuple[Job, RequestMetrics]]()
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.queued.set_function(lambda: max(0, self.open - len(self._engine.scheduler.running)))

    def start(self) -> None:
        """Start the thread; it reports to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after all calls so far, and all requests as they are."""
        self.cancelled = True
        self._posted.put(None)
        await asyncio.to_thread(self._thread.join)

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

    async def submit(self, job: Job, make: Callable[[], list[Request]], form: str) -> None:
        """Admit the requests of a job; all or none. `make` makes them in another thread, once there
        is room for them; `form` constrains their answers, where it is not empty.

        Raises what `make` raises, InputError when a request can never run, ApiError when there is
        no room for them, and when nobody waits for them any more.
        """
        field = "prompt" if job.copies == 1 else "n"
        self._check_room(job.left, field)
        self._jobs.add(job)
        try:
            # Compiling a grammar may take seconds, which other requests do not wait for.
            limiter = self._compilers if form and form not in self._known else self._tokenisers
            requests = await to_thread.run_sync(self._prepare, job, make, limiter=limiter)
            if self.cancelled or self.failed:
                raise ApiError(503, ENDING)
        except BaseException:
            self._jobs.discard(job)
            raise
        if form and form not in self._known:
            self._known.append(form)
        job.tracks = [RequestMetrics(request, job.arrived) for request in requests]
        self.post(self._admit, job)

    async def tokenise(self, work: Callable[[], T]) -> T:
        """The result of `work`, which makes token ids of texts, in one of a few threads. Raises
        ApiError where no request would be taken."""
        self._check_room(1, "messages")
        return await to_thread.run_sync(work, limiter=self._tokenisers)

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the thread does between two rounds."""
        future = Future[T]()
        self.post(_fulfil, future, work)
        return await asyncio.wrap_future(future)

    def post(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the thread call something between two rounds."""
        self._posted.put(partial(call, *arguments))

    def _fail(self) -> None:
        self.cancelled = True
        while self._jobs:
            self._jobs.pop().updates.put_nowait(None)

    def _deliver(self, updates: list[tuple[Job, Update]]) -> None:
        for job, update in updates:
            job.updates.put_nowait(update)
            job.left -= update.ended
            if not job.left:
                self._jobs.discard(job)

    def _prepare(self, job: Job, make: Callable[[], list[Request]]) -> list[Request]:
        if job.cancelled or self.cancelled:
            raise ApiError(503, ENDING)
        if time.monotonic() - job.arrived > self._max_seconds:
            raise ApiError(503, self.too_late, headers={"retry-after": "1"})
        try:
            return make()
        except InputError:
            raise
        except BaseException as error:  # a panic in native code is no Exception
            log.exception("a request could not be prepared")
            why = "the request could not be prepared: see the server's log"
            raise ApiError(500, why) from error

    def _check_room(self, count: int, field: str) -> None:
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

    def _admit(self, job: Job) -> None:
        """Add a job's requests to the engine."""
        self._engine.add(*job.requests)
        self._running += [(job, track) for track in job.tracks]

    def _end_early(self) -> None:
        """End the requests that are cancelled, and those whose time is over: their output is the
        answer; a request without any fails."""
        now = time.monotonic()
        for job, track in self._running:
            request = track.request
            if self.cancelled or job.cancelled:
                self._engine.cancel(request)
            elif now - job.arrived > self._max_seconds and request.output:
                self._engine.cancel(request, "length")
            elif now - job.arrived > self._max_seconds:
                request.failure = self.too_late
                track.cached = track.cached or 0  # nothing was looked up for one that never ran
                self._engine.cancel(request, "error")

    def _run(self) -> None:
        try:
            while self._take():
                self._end_early()
                self._engine.step()
                self._report()
            self._end_early()
        except BaseException:  # a panic in native code is no Exception
            # The engine's state is unknown: nothing may go on with it. A race has engines of its
            # own, and waits for its next step.
            self.failed = True
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail)
            for call in iter(self._posted.get, None):
                call()

    def _take(self) -> bool:
        """Run the calls posted so far; wait for one while there is nothing else to do. False: the
        end."""
        for _ in range(max(self._posted.qsize(), self._engine.idle)):
            call = self._posted.get()
            if call is None:
                self._posted.put(None)  # for whoever takes the rest, where ending fails
                return False
            call()
        return True

    def _report(self) -> None:
        updates = list[tuple[Job, Update]]()
        for job, track in self._running:
            request = track.request
            if job.traced:
                track.trace()
            self.metrics.observe(track)
            chunks = self._engine.fetch(request)
            if chunks or track.ended:
                counts = track.tokens, track.stats, track.verified
                updates.append((job, Update(request, chunks, track.ended, *counts)))
                track.verified = []
        if updates:
            self._running = [(job, track) for job, track in self._running if not track.ended]
            self._loop.call_soon_threadsafe(self._deliver, updates)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):  # a panic ends the server
            raise

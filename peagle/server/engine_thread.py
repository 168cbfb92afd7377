"""The thread that owns the engine, and the jobs that it exchanges with the event loop.

The event loop posts calls to one queue, and the thread runs them in order. The thread hands results
to the jobs with `call_soon_threadsafe`. While a request runs only the thread touches it; after its
end, only the event loop does.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from peagle.engine.engine import Engine
from peagle.engine.request import Chunk, Request, Stats
from peagle.server.metrics import Metrics, RequestMetrics, Verified
from peagle.server.responses import ApiError

T = TypeVar("T")
log = logging.getLogger(__name__)
Event = dict[str, Any]
FAILED = "the engine has failed: the server ends, start it again"


@dataclass(frozen=True, slots=True)
class Update:
    """The output of one round for a request. Until it has `ended`, only its constants may be
    read."""

    request: Request
    chunks: list[Chunk]
    ended: bool
    tokens: int  # of the output so far
    stats: Stats
    verified: list[Verified]  # empty where the job is not traced


class Job:
    """The requests of one call: `copies` answers to each of its prompts. It counts before they are
    made. `traced`: its client asks for verified drafts. `on_end` is called in the event loop once
    all have ended."""

    def __init__(
        self, count: int, copies: int, traced: bool, on_end: Callable[["Job"], None]
    ) -> None:
        self.copies = copies
        self.traced = traced
        self.arrived = time.monotonic()
        self.tracks = list[RequestMetrics]()
        self.left = count  # requests that have not ended
        self.deadline: asyncio.TimerHandle | None = None
        self._on_end = on_end
        self._received: asyncio.Queue[Update | None] = asyncio.Queue()  # None: the engine failed

    @property
    def requests(self) -> list[Request]:
        return [track.request for track in self.tracks]

    def receive(self, update: Update | None) -> None:
        """Take an update; None when the engine has failed."""
        self._received.put_nowait(update)
        if update is not None:
            self.left -= update.ended
        if update is None or not self.left:
            self._on_end(self)
            if self.deadline is not None:
                self.deadline.cancel()

    async def updates(self) -> AsyncIterator[Update]:
        """Updates until all requests have ended. Raises ApiError when the engine fails."""
        ended = 0
        while ended < len(self.tracks):
            update = await self._received.get()
            if update is None:
                raise ApiError(500, FAILED)
            ended += update.ended
            yield update


class EngineThread:
    """Runs the engine. The event loop calls `start`, `post`, `call` and `stop`; it passes the other
    public methods to `post`."""

    def __init__(self, engine: Engine, metrics: Metrics, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called in the event loop when a round raises."""
        self.failed = False
        self._engine = engine
        self._metrics = metrics
        self._on_failure = on_failure
        self._running = list[tuple[Job, RequestMetrics]]()
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; it reports to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def post(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the thread call a method of this class. (A signal's handler may post, too.)"""
        self._posted.put(partial(call, *arguments))

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the thread does between two rounds."""
        future = Future[T]()
        self.post(_fulfil, future, work)
        return await asyncio.wrap_future(future)

    async def stop(self) -> None:
        """End the thread after all calls so far."""
        self._posted.put(None)
        await asyncio.to_thread(self._thread.join)

    def admit(self, job: Job) -> None:
        """Add a job's requests to the engine."""
        self._engine.add(*job.requests)
        self._running += [(job, track) for track in job.tracks]

    def cancel(self, job: Job | None = None) -> None:
        """End the requests of one job, or all, as they are."""
        for running, track in self._running:
            if job in (running, None):
                self._engine.cancel(track.request)

    def expire(self, job: Job, too_late: str) -> None:
        """End a job whose time is over: its output is the answer; a request without any fails."""
        for request in job.requests:
            if request.finish_reason is None and not request.output:
                request.failure = too_late
            self._engine.cancel(request, "length" if request.output else "error")

    def _run(self) -> None:
        try:
            while self._take():
                self._engine.step()
                self._report()
        except BaseException:  # a panic in native code is no Exception
            # The engine's state is unknown: nothing may go on with it.
            self.failed = True
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._on_failure)

    def _take(self) -> bool:
        """Run the calls posted so far; wait for one while there is nothing else to do. False: the
        end."""
        for _ in range(max(self._posted.qsize(), self._engine.idle)):
            call = self._posted.get()
            if call is None:
                return False
            call()
        return True

    def _report(self) -> None:
        updates = list[tuple[Job, Update]]()
        for job, track in self._running:
            request = track.request
            tokens, stats = track.tokens, track.stats
            self._metrics.observe(track)
            if job.traced:
                track.trace(tokens, stats.rounds)
            chunks = self._engine.fetch(request)
            if chunks or track.ended:
                counts = track.tokens, track.stats, track.verified
                updates.append((job, Update(request, chunks, track.ended, *counts)))
                track.verified = []
        if updates:
            self._running = [(job, track) for job, track in self._running if not track.ended]
            self._loop.call_soon_threadsafe(_deliver, updates)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # a panic ends the server
        future.set_exception(error)


def _deliver(updates: list[tuple[Job, Update]]) -> None:
    for job, update in updates:
        job.receive(update)

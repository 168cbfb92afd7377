"""Routes of the console's page, and its race: one prompt decoded by the target alone and with each
head on this machine, in turns.

Each lane of a race has an engine of its own: the server's is not touched. The engine's thread runs
their rounds between those of other requests, which no lane's time includes. As in `peagle demo` the
mode is deterministic, so all lanes emit the same tokens.
"""

import logging
import shlex
from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import Field

from peagle.backends.batch import BLOCK
from peagle.catalog import how_to_get, known_entry, load_catalog, model_name, record
from peagle.engine.drafting import MAX_NODES, Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.methods.base import Method
from peagle.methods.registry import METHODS
from peagle.model.described import DescribedTarget
from peagle.model.drafter import Drafter
from peagle.server.answers import drafts, stream
from peagle.server.conversations import conversation_ids
from peagle.server.responses import ApiError
from peagle.server.schema import Body, Messages
from peagle.server.worker import Event, Worker

log = logging.getLogger(__name__)
MAX_PROMPT = 2048


class RaceBody(Body):
    """POST /peagle/race."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=256)] = 96  # of each answer


class Lane(NamedTuple):
    """A way to decode in a race."""

    title: str
    drafting: Drafting = Drafting()
    head: Drafter | Path | None = None
    missing: str | None = None  # why its head is not here

    def shown(self) -> dict[str, Any]:
        """Its part of the page."""
        drafts = str(self.drafting).strip("-")
        return {"title": self.title, "drafts": drafts, "missing": self.missing}


class Console:
    """Routes that only the page uses, and the races of one server."""

    def __init__(self, llm: LLM, worker: Worker) -> None:
        self._llm = llm
        self._worker = worker
        self._racing = False
        self._load = cache(llm.load_head)  # heads that are not served, for their first race

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes to an app, undocumented: they may change."""
        hidden: dict[str, Any] = {"response_model": None, "include_in_schema": False}
        app.get("/peagle/console", **hidden)(self.about)
        app.get("/peagle/catalog", **hidden)(self.catalog)
        app.post("/peagle/race", **hidden)(self.race)

    def about(self) -> dict[str, Any]:
        """The drafting of the served model, and the lanes of a race."""
        drafting = self._llm.drafting
        lanes = [lane.shown() for lane in self.lanes()]
        return {"method": drafting.method, "drafts": str(drafting), "lanes": lanes}

    def catalog(self) -> list[dict[str, Any]]:
        """All entries, each with the command that deploys it."""
        rows = [record(name, entry) for name, entry in load_catalog().items()]
        for row in rows:
            row["command"] = shlex.join(["peagle", "deploy", row["name"]])
            for head in row["heads"].values():
                head["folder"] = head["folder"] and Path(head["folder"]).name
        return rows

    async def race(self, body: RaceBody) -> Response:
        """Events of a race, until it is over or its client leaves."""
        make_ids = partial(conversation_ids, self._llm, body.messages, [], {})
        with body.refusals():
            ids = await self._worker.tokenise(make_ids)
        lanes = await run_in_threadpool(self.lanes)  # the engine's thread reads no catalog
        return stream(self._events(self.steps(lanes, ids, body.max_tokens)))

    async def _events(self, steps: Generator[Event]) -> AsyncGenerator[Event]:
        """Run a race, until the server is told to end. Raises ApiError where it fails, and for a
        second race at the same time."""
        if self._racing:
            raise ApiError(429, "a race is on: try again")
        self._racing = True
        try:
            while not (self._worker.cancelled or self._worker.draining):
                event = await self._worker.call(partial(next, steps, None))
                if event is None:
                    break
                if event:
                    yield event
        except InputError as wrong:
            raise ApiError(400, str(wrong), param=wrong.field) from wrong
        except Exception as error:
            log.exception("a race failed")
            raise ApiError(500, "it failed: see the server's log") from error
        finally:
            self._worker.post(steps.close)
            self._racing = False

    def lanes(self) -> list[Lane]:
        """The target alone; with chains of a method that drafts them, and with lookup, too; with a
        parallel method. All draft with the server's options where a lane can."""
        served = self._llm.drafting
        trees = Drafting(k=None, lookup=True)
        own = trees if served.k == 0 else served
        lanes = [Lane("Target alone")]
        for method in sorted(METHODS.values(), key=lambda each: each.parallel):
            head, missing = self._head(method)
            ways = {method.title: own}
            if not method.parallel:
                ways[method.title] = served if served.k else Drafting(k=None)
                ways[f"{method.title} + lookup"] = trees if served.k else replace(own, lookup=True)
            for title, way in ways.items():
                lanes.append(Lane(title, replace(way, method=method.name), head, missing))
        if served.method == "lookup":
            lanes.append(Lane("Lookup", served))
        return lanes

    def _head(self, method: Method) -> tuple[Drafter | Path | None, str | None]:
        """The head of a method: the served one or the catalog's folder; or why there is none.
        Nothing is downloaded for a race."""
        llm = self._llm
        if llm.drafting.method == method.name:
            return llm.drafter, None
        entry = known_entry(llm.target.name)
        known = entry.heads.get(method.name) if entry else None
        if known is None:
            name = model_name(llm.target.name)
            return None, f"no {method.title} head of {name} is known: train one with peagle train"
        if known.folder is None:
            return None, f"{known.hub} is on the hub, and a race downloads nothing"
        return (known.folder, None) if known.folder.is_dir() else (None, how_to_get(known))

    def steps(self, lanes: list[Lane], ids: list[int], max_tokens: int) -> Generator[Event]:
        """Decode greedily, one round per step; those that warm up have no event. Raises InputError
        for a prompt that is too long, and for a head that does not fit."""
        if len(ids) > MAX_PROMPT:
            why = f"{len(ids)} tokens, a race takes {MAX_PROMPT}"
            raise InputError(why, field="messages", fix="shorten them")
        room = len(ids) + max_tokens + MAX_NODES + 2 * BLOCK
        alone = self._llm.use(None, lookup=False, max_batch=1, kv_tokens=room)
        if not isinstance(alone.target, DescribedTarget):  # native code is always deterministic
            alone = LLM(alone.target, max_batch=1, kv_tokens=room, deterministic=True)
        yield {"lanes": [lane.shown() for lane in lanes]}
        params = SamplingParams(max_tokens=max_tokens)
        answers = list[list[int]]()
        for number, lane in enumerate(lanes):
            if lane.missing is not None:
                continue
            head = self._load(lane.head) if isinstance(lane.head, Path) else lane.head
            make = partial(alone.use, head, **lane.drafting.options)  # with an empty cache
            for _ in make().stream([ids[:64]], SamplingParams(max_tokens=4)):  # kernels warm up
                yield {}
            request = yield from _run(make(), ids, params, number)
            answers.append(request.output)
        same = len(commonprefix(answers))
        yield {"same_tokens": same, "identical": all(len(each) == same for each in answers)}


def _run(
    llm: LLM, ids: list[int], params: SamplingParams, lane: int
) -> Generator[Event, None, Request]:
    """One event for each round, with the seconds so far."""
    run = llm.stream([ids], params)
    [request] = run.requests
    with closing(run):
        while request.finish_reason is None:
            chunks = run.step()
            event = drafts(len(request.output), request.stats, chunks, []).model_dump()
            ended = request.finish_reason is not None
            yield {"lane": lane, "at": run.seconds, "ended": ended, **event}
    if request.failure is not None:
        raise InputError(request.failure)
    return request

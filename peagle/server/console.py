"""Routes of the console's page, and its race: one prompt decoded by the target alone and with each
head on this machine, in turns.

A race is an exclusive job for the engine thread. Each method has an engine of its own, which drafts
with the server's options; the server's engine is not touched. As in `peagle demo` the mode is
deterministic: all methods emit the same tokens.
"""

import shlex
from collections.abc import Generator
from contextlib import closing
from functools import cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import Field

from peagle.backends.batch import BLOCK
from peagle.catalog import known_entry, load_catalog, record
from peagle.engine.drafting import MAX_NODES
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.server.answers import stream
from peagle.server.engine_thread import Event, pieces
from peagle.server.prompts import conversation_ids
from peagle.server.schema import Body, Messages
from peagle.server.worker import Worker

MAX_TOKENS = 256  # of each answer: all other requests wait
MAX_PROMPT = 2048


class RaceBody(Body):
    """POST /peagle/race."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 96


class Console:
    """Routes that only the page uses, and the races of one server."""

    def __init__(self, llm: LLM, worker: Worker) -> None:
        self._llm = llm
        self._worker = worker
        self._load = cache(llm.load_head)  # heads that are not served, for their first race

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes to an app, undocumented: they may change."""
        hidden: dict[str, Any] = {"response_model": None, "include_in_schema": False}
        app.get("/peagle/console", **hidden)(self.about)
        app.get("/peagle/catalog", **hidden)(self.catalog)
        app.post("/peagle/race", **hidden)(self.race)

    def about(self) -> dict[str, Any]:
        """The drafting of the served model, and its context in tokens."""
        drafting = self._llm.drafting
        context = self._llm.target.max_context
        return {"method": drafting.method, "drafts": str(drafting), "context": context}

    def catalog(self) -> list[dict[str, Any]]:
        """All entries, each with the command that deploys it."""
        rows = [record(name, entry) for name, entry in load_catalog().items()]
        for row in rows:
            row["command"] = shlex.join(["peagle", "deploy", row["name"]])
            for head in row["heads"].values():
                head["folder"] = head["folder"] and Path(head["folder"]).name
        return rows

    async def race(self, body: RaceBody) -> Response:
        """Events of a race. Other requests wait until it is over or its client leaves."""
        make_ids = partial(conversation_ids, self._llm, body.messages, [], {})
        with body.refusals():
            ids = await self._worker.tokenise(make_ids)
        steps = self.steps(ids, body.max_tokens)
        return stream(self._worker.run_exclusively(steps))

    def lanes(self) -> dict[str, Drafter | Path | None]:
        """Methods and their heads: the target alone, then the heads in the catalog's order, those
        in folders of this machine (nothing is downloaded for a race), and the served one."""
        llm = self._llm
        lanes: dict[str, Drafter | Path | None] = {"none": None}
        entry = known_entry(llm.target.name)
        for method, head in (entry.heads if entry else {}).items():
            if head.folder and head.folder.is_dir():
                lanes[method] = head.folder
        lanes[llm.drafting.method] = llm.drafter
        return lanes

    def steps(self, ids: list[int], max_tokens: int) -> Generator[Event, None, None]:
        """Decode greedily, one round per step. Raises InputError for a prompt that is too long, and
        for a head that does not fit."""
        if len(ids) > MAX_PROMPT:
            why = f"{len(ids)} tokens, a race takes {MAX_PROMPT}"
            raise InputError(why, field="messages", fix="shorten them")
        room = len(ids) + max_tokens + MAX_NODES + 2 * BLOCK
        alone = LLM(self._llm.target, max_batch=1, kv_tokens=room, deterministic=True)
        lanes = self.lanes()
        runners = [self._use(alone, *lane) for lane in lanes.items()]
        drafting = [llm.drafting for llm in runners]
        yield {"lanes": [{"method": d.method, "drafts": str(d).strip("-")} for d in drafting]}
        params = SamplingParams(max_tokens=max_tokens)
        answers = list[list[int]]()
        for number, (lane, llm) in enumerate(zip(lanes.items(), runners, strict=True)):
            warm_up = self._use(alone, *lane)  # kernels for these numbers of rows
            warm_up.generate([ids], SamplingParams(max_tokens=4))
            # Another engine: its cache is empty.
            request = yield from _run(llm, ids, params, number)
            answers.append(request.output)
        same = len(commonprefix(answers))
        yield {"same_tokens": same, "identical": all(len(each) == same for each in answers)}

    def _use(self, alone: LLM, method: str, head: Drafter | Path | None) -> LLM:
        """Another LLM over the target of `alone`, with a lane's head and the server's options."""
        if method == "none":
            return alone.use(None, lookup=False)
        if isinstance(head, Path):
            head = self._load(head)
        served = self._llm.drafting
        chains = head is not None and not method_of(head.config).parallel
        if served.mode == "none":
            return alone.use(head)
        if served.mode == "tree" and chains and not served.lookup:
            return alone.use(head, lookup=False)
        return alone.use(head, **served.options)


def _run(
    llm: LLM, ids: list[int], params: SamplingParams, lane: int
) -> Generator[Event, None, Request]:
    run = llm.stream([ids], params)
    [request] = run.requests
    first = 0.0
    found = 0
    with closing(run):
        while request.finish_reason is None:
            chunks = run.step()
            tokens = len(request.output)
            found += sum(chunk.source == "lookup" for chunk in chunks)
            first = first or (run.seconds if tokens else 0.0)
            text = [piece.model_dump() for piece in pieces(chunks)]
            yield {"lane": lane, "at": run.seconds, "tokens": tokens, "pieces": text}
    if request.failure is not None:
        raise InputError(request.failure)
    result = {
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens / run.seconds,
        "first_token_seconds": first,
        "acceptance_length": request.stats.acceptance_length,
        "nodes": request.stats.nodes_per_round,
        "tokens_per_forward": request.stats.tokens_per_forward,
        "from_lookup": found / tokens,
    }
    yield {"lane": lane, "result": result}
    return request

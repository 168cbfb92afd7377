"""What the console's page asks for besides OpenAI's API."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import Field

from peagle.catalog import load_catalog, record
from peagle.engine.llm import LLM
from peagle.server.answers import stream
from peagle.server.messages import conversation_ids
from peagle.server.race import MOST_TOKENS, Races
from peagle.server.schema import Body, Messages
from peagle.server.worker import Worker


class RaceBody(Body):
    """POST /peagle/race."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 96


class Console:
    """What the page can do that clients of OpenAI's API cannot."""

    def __init__(self, llm: LLM, worker: Worker) -> None:
        self._llm = llm
        self._worker = worker
        self._races = Races(llm)

    def add_routes(self, app: FastAPI) -> None:
        """They are the page's own and may change: no document describes them."""
        own: dict[str, Any] = {"response_model": None, "include_in_schema": False}
        app.get("/peagle/console", **own)(self.about)
        app.get("/peagle/catalog", **own)(self.catalog)
        app.post("/peagle/race", **own)(self.race)

    def about(self) -> dict[str, Any]:
        """How the served model drafts, and its context in tokens."""
        drafting, context = self._llm.drafting, self._llm.target.max_context
        return {"method": drafting.method, "drafts": str(drafting), "context": context}

    def catalog(self) -> list[dict[str, Any]]:
        """All entries, each with the command that deploys it, but for the place."""
        rows = [record(name, entry) for name, entry in load_catalog().items()]
        for row in rows:
            row["command"] = shlex.join(["peagle", "deploy", row["name"]])
            for head in row["heads"].values():
                head["folder"] = head["folder"] and Path(head["folder"]).name
        return rows

    async def race(self, body: RaceBody) -> Response:
        """Events of a race. Others wait until it is over; it is over when its client leaves."""
        make_ids = partial(conversation_ids, self._llm, body.messages, [], {})
        ids = await self._worker.tokenise(make_ids)
        steps = self._races.steps(ids, body.max_tokens)
        return stream(self._worker.run_exclusively(steps))

"""What the console's page asks for besides OpenAI's API."""

import asyncio
import shlex
import signal
import sys
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import Field

from peagle.catalog import find_entry, load_catalog, record
from peagle.engine.llm import LLM
from peagle.server.answers import stream
from peagle.server.auth import check_same_origin, is_trusted
from peagle.server.errors import ApiError
from peagle.server.messages import conversation_ids
from peagle.server.race import MOST_TOKENS, Races, drafts
from peagle.server.schema import Body, Messages
from peagle.server.worker import Worker

PYTHON = (sys.executable, "-m")
# Whoever started this server in the background may have it ignore SIGINT, and what it starts, too.
HEEDING = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])",
)


class RaceBody(Body):
    """POST /peagle/race."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 96


class DeployBody(Body):
    """POST /peagle/deploy."""

    name: str


class Console:
    """What the page can do that clients of OpenAI's API cannot."""

    def __init__(self, llm: LLM, worker: Worker, key: str | None) -> None:
        self._llm = llm
        self._worker = worker
        self._key = key
        self._races = Races(llm)
        self._deploying = False

    def add_routes(self, app: FastAPI) -> None:
        """They are the page's own and may change: no document describes them."""
        own: dict[str, Any] = {"response_model": None, "include_in_schema": False}
        app.get("/peagle/console", **own)(self.about)
        app.get("/peagle/catalog", **own)(self.catalog)
        app.post("/peagle/race", **own)(self.race)
        app.post("/peagle/deploy", **own)(self.deploy)

    def about(self, http: HttpRequest) -> dict[str, Any]:
        """What is served, and whether this client may deploy."""
        about = {"method": self._llm.method, "drafts": drafts(self._llm)}
        return about | {"deploys": is_trusted(http, self._key)}

    def catalog(self) -> list[dict[str, Any]]:
        """All entries, each with the command that deploys it here."""
        rows = [record(name, entry) for name, entry in load_catalog().items()]
        for row in rows:
            row["command"] = shlex.join(_command(row["name"]))
            for head in row["heads"].values():
                head["folder"] = head["folder"] and Path(head["folder"]).name
        return rows

    async def race(self, body: RaceBody) -> Response:
        """Events of a race. Others wait until it is over; it is over when its client leaves."""
        make_ids = partial(conversation_ids, self._llm, body.messages, [], {})
        ids = await self._worker.tokenise(make_ids)
        steps = self._races.steps(ids, body.max_tokens)
        return stream(self._worker.run_exclusively(steps))

    async def deploy(self, body: DeployBody, http: HttpRequest) -> Response:
        """Run the command, and stream its output. A client that leaves interrupts it."""
        if not is_trusted(http, self._key):
            why = "without an API key only this machine may deploy: give the server an `api_key`"
            raise ApiError(403, why)
        check_same_origin(http)
        await run_in_threadpool(find_entry, body.name)
        return stream(self._deployment(_command(body.name)))

    async def _deployment(self, command: list[str]) -> AsyncGenerator[dict[str, Any]]:
        if self._deploying:
            raise ApiError(409, "a deployment is on: wait for its end")
        self._deploying = True
        try:
            process = await asyncio.create_subprocess_exec(
                *HEEDING, *PYTHON, *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                async for line in process.stdout:
                    yield {"line": line.decode(errors="replace").rstrip("\n")}
                yield {"exit_code": await process.wait()}
            finally:
                if process.returncode is None:
                    process.send_signal(signal.SIGINT)  # it takes back what it began
        finally:
            self._deploying = False


def _command(name: str) -> list[str]:
    """8000, deploy's own choice of a port, is most likely this server's."""
    return ["peagle", "deploy", name, "--to", "local", "--yes", "--port", "0"]

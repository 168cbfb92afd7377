"""The routes: OpenAI's API, vLLM's additions, SageMaker's contract."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from peagle import __version__
from peagle.engine.llm import LLM
from peagle.engine.request import Request as EngineRequest
from peagle.errors import InputError
from peagle.server import middleware, responses, schema
from peagle.server.answers import Build, ChatBuilder, TextBuilder, answer, cancel_if_left
from peagle.server.console import Console
from peagle.server.conversations import conversation_ids
from peagle.server.metrics import Metrics
from peagle.server.responses import ApiError, respond
from peagle.server.worker import Job, Worker

MakeIds = Callable[[], list[int]]  # makes the token ids of a prompt
Announce = Callable[[], None]  # called once, when requests are accepted


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server."""

    model: str  # the name that clients ask for
    api_key: str | None = None
    max_queue: int = 256  # waiting requests
    max_seconds: float = 600  # time of one request, waiting included
    allowed_hosts: tuple[str, ...] = ()  # further host names of requests without a key; "*": any


class Api:
    """The handlers of all documented routes."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.created = int(time())
        self.metrics = Metrics(llm.engine, config.model)
        self.worker = Worker(llm, self.metrics, config.max_queue, config.max_seconds)
        self.context = llm.context

    async def models(self) -> responses.Models:
        """The list of models, which has one."""
        return responses.Models(data=[await self.about(self.config.model)])

    async def about(self, name: str) -> responses.Model:
        """The model of this name."""
        self._check_model(name)
        return responses.Model(id=name, created=self.created, max_model_len=self.context)

    async def completions(self, body: schema.CompletionBody, http: HttpRequest) -> Response:
        """Continue texts."""
        numbered = enumerate(body.prompts())
        prompts = [partial(self.llm.prompt_ids, prompt, number) for number, prompt in numbered]
        build = partial(TextBuilder, self.llm.tokenizer)
        return await self._generate(http, body, build, prompts)

    async def chat(self, body: schema.ChatBody, http: HttpRequest) -> Response:
        """Answer conversations."""
        tools = body.offered()
        body.constrain_calls(self.llm.tokenizer)
        several = None if body.parallel_tool_calls else 1
        max_calls = several if tools else 0
        args = body.template_args(str(self.llm.tokenizer.chat_template))
        prompt = partial(conversation_ids, self.llm, body.messages, tools, args)
        build = partial(ChatBuilder, self.llm.tokenizer, max_calls)
        return await self._generate(http, body, build, [prompt])

    async def _generate(
        self, http: HttpRequest, body: schema.Generation, build: Build, prompts: Sequence[MakeIds]
    ) -> Response:
        """Answer prompts; another thread makes their token ids."""
        self._check_model(body.model)

        def make() -> list[EngineRequest]:
            made = list[EngineRequest]()
            for number, ids in enumerate([make_ids() for make_ids in prompts]):
                params = body.params(room=self.context - len(ids))
                made += self.llm.make_requests(ids, params, len(made), number)
            return made

        job = Job(len(prompts) * body.n, body.n, body.stream and body.stream_options.peagle_drafts)
        # Kept, since the loop holds its tasks weakly.
        http.state.watch = asyncio.create_task(cancel_if_left(http, job))
        with body.refusals():
            await self.worker.submit(job, make, str(body.constraint() or ""))
        return await answer(http, self.worker, build, body, job)

    async def invocations(
        self, body: Annotated[dict[str, Any], Body()], http: HttpRequest
    ) -> Response:
        """SageMaker's one route for both bodies."""
        if body.get("messages") is not None:
            return await self.chat(schema.ChatBody.model_validate(body), http)
        return await self.completions(schema.CompletionBody.model_validate(body), http)

    async def health(self, response: Response) -> responses.Health:
        """Whether requests are taken."""
        state = self.worker.state
        if state != "ok":
            response.status_code = 503
        return responses.Health(status=state)

    async def metrics_text(self) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.model:
            fix = f"there is {self.config.model!r}"
            error = InputError("is not served here", field="model", value=name, fix=fix)
            raise ApiError(404, str(error), param="model", code="model_not_found")


def create_app(api: Api, announce: Announce = lambda: None) -> FastAPI:
    """The application; its worker runs from its start to its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        api.worker.start()
        await run_in_threadpool(api.llm.warm_up)
        announce()
        yield
        await api.worker.stop()

    texts = responses.TEXTS
    app = FastAPI(
        title="peagle",
        version=__version__,
        description=texts["about"],
        responses=responses.ERRORS,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    text = responses.generated(responses.Completion)
    chat = responses.generated(responses.ChatCompletion)
    either = responses.generated(responses.Completion | responses.ChatCompletion)
    app.post("/v1/completions", responses=text)(api.completions)
    app.post("/v1/chat/completions", responses=chat)(api.chat)
    app.post("/invocations", responses=either, openapi_extra=texts["either_body"])(api.invocations)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.about)
    app.get("/metrics", responses=texts["plain_text"])(api.metrics_text)
    for path in middleware.OPEN:
        app.get(path, responses=responses.HEALTH, openapi_extra={"security": []})(api.health)
    for kind in (HTTPException, RequestValidationError, ValidationError, InputError, Exception):
        app.add_exception_handler(kind, respond)
    key = api.config.api_key
    Console(api.llm, api.worker).add_routes(app)
    # The last one is the outermost.
    if key is not None:
        responses.document_key(app)
        app.add_middleware(middleware.Auth, check=partial(middleware.check_key, key))
    app.add_middleware(middleware.Limits, context=api.context)
    app.add_middleware(middleware.Route)
    app.add_middleware(middleware.Pages)
    if key is None:
        check = partial(middleware.check_host_header, api.config.allowed_hosts)
        app.add_middleware(middleware.Auth, check=check)
    return app

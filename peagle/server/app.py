"""The routes: OpenAI's API, vLLM's additions, SageMaker's contract."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from peagle import __version__
from peagle.backends.batch import BLOCK
from peagle.engine.llm import LLM
from peagle.engine.request import Request as EngineRequest
from peagle.errors import InputError, shortened
from peagle.server import responses
from peagle.server.answers import answer
from peagle.server.auth import OPEN, Auth, check_host_header, check_key
from peagle.server.console import Console
from peagle.server.errors import ApiError, respond
from peagle.server.forms import ChatForm, Form, TextForm
from peagle.server.limits import Limits, body_limit
from peagle.server.messages import conversation_ids
from peagle.server.metrics import Metrics
from peagle.server.middleware import Pages, Route
from peagle.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    StructuredOutputs,
    TokenizeBody,
)
from peagle.server.tools import call_grammar
from peagle.server.worker import Worker

# The body of /invocations is read only once it is known what it is.
SCHEMAS = [{"$ref": f"#/components/schemas/{name}"} for name in ("CompletionBody", "ChatBody")]
EITHER_BODY = {"requestBody": {"content": {"application/json": {"schema": {"anyOf": SCHEMAS}}}}}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server is reached."""

    model: str  # the name that clients ask for
    api_key: str | None = None
    max_queue: int = 256  # requests that may wait
    max_seconds: float = 600  # of a request, its wait included
    allowed_hosts: tuple[str, ...] = ()  # further names, for requests without a key; "*": any


class Api:
    """The handlers, and what they share."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.model = config.model
        self.created = int(time())
        engine = llm.engine
        self.metrics = Metrics(engine, config.model)
        self.worker = Worker(llm, self.metrics, config.max_queue, config.max_seconds)
        room = engine.scheduler.pool.count * BLOCK - engine.scheduler.num_lookahead_tokens
        self.context = min(llm.target.max_context, room)  # the longest request there is room for

    async def models(self) -> responses.Models:
        """What is served."""
        return responses.Models(data=[await self.about(self.model)])

    async def about(self, name: str) -> responses.Model:
        """The model of this name."""
        self._check_model(name)
        return responses.Model(id=self.model, created=self.created, max_model_len=self.context)

    async def completions(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Continue texts."""
        prompts = body.prompts()

        def token_ids() -> list[list[int]]:
            return [self.llm.prompt_ids(prompt, i) for i, prompt in enumerate(prompts)]

        form = TextForm(self.llm.tokenizer)
        return await self._generate(http, body, form, len(prompts), token_ids)

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        """Answer conversations."""
        tools, forced = body.offered(), body.forced()
        if forced:
            several = body.parallel_tool_calls and body.tool_choice == "required"
            grammar = call_grammar(self.llm.tokenizer, forced, several)
            body.structured_outputs = StructuredOutputs(grammar=grammar)

        most_calls = None if body.parallel_tool_calls else 1
        form = ChatForm(self.llm.tokenizer, most_calls if tools else 0)

        def token_ids() -> list[list[int]]:
            ids = conversation_ids(self.llm, body.messages, tools, body.template_args)
            form.answers(ids)
            return [ids]

        try:
            return await self._generate(http, body, form, 1, token_ids)
        except InputError as error:
            if forced and str(error).startswith("grammar"):  # which was made of the tools
                raise InputError(f"tools: {error}") from error
            raise

    async def _generate(
        self,
        http: HttpRequest,
        body: Generation,
        form: Form,
        count: int,
        token_ids: Callable[[], list[list[int]]],
    ) -> Response:
        """Answer `count` prompts, whose `token_ids` another thread makes."""
        self._check_model(body.model)

        def make() -> list[EngineRequest]:
            made = list[EngineRequest]()
            for ids in token_ids():
                params = body.params(room=self.context - len(ids))
                made += self.llm.make_requests(ids, params, len(made))
            return made

        job = await self.worker.submit(count * body.n, make, body.n, bool(body.constraint()))
        return await answer(http, self.worker, form, body, job)

    async def invocations(
        self, body: Annotated[dict[str, Any], Body()], http: HttpRequest
    ) -> Response:
        """SageMaker's one route for all."""
        if "messages" in body:
            return await self.chat(ChatBody.model_validate(body), http)
        return await self.completions(CompletionBody.model_validate(body), http)

    async def tokenize(self, body: TokenizeBody) -> responses.Tokens:
        """Ids of a text, or of a conversation up to where its answer begins."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("prompt: give either a prompt or messages")
        ids = await self.worker.tokenise(partial(self._token_ids, body))
        return responses.Tokens(count=len(ids), max_model_len=self.context, tokens=ids)

    def _token_ids(self, body: TokenizeBody) -> list[int]:
        if body.messages is not None:
            return conversation_ids(self.llm, body.messages, [], {})
        assert body.prompt is not None
        self.llm.check_text(body.prompt, "prompt")
        how = {"add_special_tokens": body.add_special_tokens}
        return self.llm.tokenizer(body.prompt, **how)["input_ids"]

    def detokenize(self, body: DetokenizeBody) -> responses.Text:
        """The text of ids, special tokens included."""
        self._check_model(body.model)
        most = len(self.llm.target.embedding) - 1
        if wrong := [token for token in body.tokens if not 0 <= token <= most]:
            raise InputError(f"tokens {wrong[0]}: the target's token ids are 0 to {most}")
        return responses.Text(prompt=self.llm.tokenizer.decode(body.tokens))

    async def health(self) -> JSONResponse:
        """Whether requests are taken."""
        worker = self.worker
        status = "failed" if worker.failed else "draining" if worker.draining else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics_text(self) -> Response:
        """For Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            why = f"model {shortened(name)!r}: not served here, there is {self.model!r}"
            raise ApiError(404, why, param="model", code="model_not_found")


def create_app(api: Api) -> FastAPI:
    """The application; its worker runs from its start to its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        api.worker.start()
        await run_in_threadpool(api.llm.warm_up)
        yield
        await api.worker.stop()

    app = FastAPI(
        title="peagle",
        version=__version__,
        description=responses.ABOUT,
        responses=responses.ERRORS,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    text, chat = responses.Completion, responses.ChatCompletion
    app.post("/v1/completions", responses=responses.generated(text))(api.completions)
    app.post("/v1/chat/completions", responses=responses.generated(chat))(api.chat)
    either = responses.generated(text | chat)
    app.post("/invocations", responses=either, openapi_extra=EITHER_BODY)(api.invocations)
    app.post("/tokenize")(api.tokenize)
    app.post("/detokenize")(api.detokenize)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.about)
    app.get("/metrics", responses=responses.PLAIN_TEXT)(api.metrics_text)
    for path in OPEN:
        app.get(path, responses=responses.HEALTH, openapi_extra={"security": []})(api.health)
    for kind in (HTTPException, RequestValidationError, ValidationError, InputError, Exception):
        app.add_exception_handler(kind, respond)
    key = api.config.api_key
    Console(api.llm, api.worker).add_routes(app)
    responses.complete_document(app, guarded=key is not None)
    # The last one is the outermost.
    if key is not None:
        app.add_middleware(Auth, check=partial(check_key, key))
    app.add_middleware(Limits, body=body_limit(api.context))
    app.add_middleware(Route)
    app.add_middleware(Pages)
    if key is None:
        app.add_middleware(Auth, check=partial(check_host_header, api.config.allowed_hosts))
    return app

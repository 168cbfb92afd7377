"""Bodies of responses, errors as OpenAI's clients read them, and the document of all routes,
/openapi.json."""

from operator import not_
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from peagle.engine.tree import Source
from peagle.errors import InputError, shortened

ABOUT = (
    "OpenAI's API with vLLM's additions, SageMaker's two routes and Prometheus' one. A field that "
    "is null counts as left out. An unlisted field is ignored, or refused where it would change "
    "the answer or its name is close to a listed one."
)
CLIENT_ERRORS = (
    "400: a field cannot be used: `param` names it, the message its value and the fix. 401: the "
    "API key is missing or wrong. 404: the model is not served here. 408: the body took too long. "
    "413: the body is too large. 429: too many requests wait: retry after `Retry-After` seconds."
)
SERVER_ERRORS = (
    "500: the server failed. 503: the server ends, its engine has failed, or the answer did not "
    "begin in time."
)
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
ROUTES = "there are POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
GONE = {  # routes of earlier versions, and what does it now
    "/tokenize": "the model's tokenizer counts tokens, and so does an answer's usage.prompt_tokens",
    "/detokenize": "the model's tokenizer decodes tokens",
}
Responses = dict[int | str, dict[str, Any]]
LeftOut = Field(exclude_if=not_)  # a field without a value is not sent


class Answer(BaseModel):
    """The body of a response, or a part of one; it has no other fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """OpenAI's form of an error."""

    error: ErrorDetail


class Model(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "peagle"
    max_model_len: int


class Models(Answer):
    object: Literal["list"] = "list"
    data: list[Model]


class PromptDetails(Answer):
    cached_tokens: int


class AnswerDetails(Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


class Piece(Answer):
    """Text as it was emitted."""

    text: str
    place: int  # depth in the draft, from 1; 0: the target's token
    source: Source


class Tree(Answer):
    """A verified draft. Its nodes are numbered from 1; 0: the token before the draft."""

    before: str
    nodes: list[str]  # tokens that were offered
    parents: list[int]
    chances: list[float]  # that the path to a node is accepted, as expected
    accepted: list[int]  # nodes, in order
    after: str  # the target's own token after them
    matched: int  # newest tokens that lookup found earlier in the text
    looked_up: list[int]  # nodes that lookup proposed, in order


class Drafts(Answer):
    """Counts of drafting from the beginning of an answer; see `engine.request.Stats`."""

    tokens: int
    rounds: int  # with drafts
    drafted: int  # draft tokens
    accepted: int  # accepted draft tokens
    accepted_from_lookup: int  # accepted tokens that only lookup proposed
    forwards: int  # decoding rounds, with or without drafts
    pieces: list[Piece]  # new text
    trees: list[Tree]  # new ones


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ContentLogprob]
    refusal: None = None


class Choice(Answer):
    index: int
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None = None
    peagle_drafts: Annotated[Drafts | None, LeftOut] = None


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None = None


class Function(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    index: Annotated[int | None, Field(exclude_if=lambda index: index is None)] = None
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: Annotated[str, LeftOut] = ""  # where the target marks it
    tool_calls: Annotated[list[ToolCall], LeftOut] = []


class Delta(Answer):
    role: Annotated[Literal["assistant"] | None, LeftOut] = None
    content: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None
    reasoning: Annotated[str, LeftOut] = ""
    tool_calls: Annotated[list[ToolCall], LeftOut] = []


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatPart(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class Generated(Answer):
    id: str
    created: int
    model: str
    usage: Usage | None = None


class Completion(Generated):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ChatCompletion(Generated):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(Generated):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatPart]


class Health(Answer):
    status: Literal["ok", "draining", "failed"]


RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
ERRORS: Responses = {
    "4XX": {"model": Error, "description": CLIENT_ERRORS, "headers": RETRY_AFTER},
    "5XX": {"model": Error, "description": SERVER_ERRORS, "headers": RETRY_AFTER},
}
HEALTH: Responses = {n: {"model": Health, "description": "The state."} for n in (200, 503)}
PLAIN_TEXT: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def generated(model: Any) -> Responses:
    """Responses of a route that generates: `model`, or events where the body sets `stream`."""
    data = {"type": "string", "description": "A part of the answer as JSON, an error, or [DONE]."}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"model": model, "content": {"text/event-stream": {"schema": event}}}}


def document_key(app: FastAPI) -> None:
    """Document that all routes need the API key, except those that declare otherwise."""
    document = app.openapi()
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]


class ApiError(HTTPException):
    """An error response; `param` is the field of the body that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = KINDS.get(self.status_code, "invalid_request_error")
        detail = ErrorDetail(message=self.detail, type=kind, param=self.param, code=self.code)
        return Error(error=detail).model_dump()

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def respond(request: Request, error: Exception) -> JSONResponse:
    """Any error of a route as a response."""
    return _to_api_error(request, error).response()


def _to_api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InputError():
            return ApiError(400, str(error), param=error.field)
        case RequestValidationError() | ValidationError():
            return _invalid_body(error)
        case HTTPException(status_code=404 | 405):
            path = request.url.path
            why = f"{request.method} {path}: no such route, {GONE.get(path, ROUTES)}"
            return ApiError(error.status_code, why)
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case _:
            # The connection is closed after it: clients should know.
            headers = {"connection": "close"}
            return ApiError(500, "the server failed: see its log", headers=headers)


def _invalid_body(error: RequestValidationError | ValidationError) -> ApiError:
    """The first error of a body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    refused = first.get("ctx", {}).get("error")
    if isinstance(refused, InputError):
        return ApiError(400, str(refused), param=refused.field)
    path = [str(part) for part in first["loc"] if part != "body"]
    if not path:
        why = "the body must be a JSON object, with content-type application/json"
        return ApiError(400, why)
    if first["type"] == "missing":
        return ApiError(400, f"{path[0]}: is missing; give it", param=path[0])
    value = shortened(repr(first["input"]))
    why = first["msg"][0].lower() + first["msg"][1:]
    return ApiError(400, f"{'.'.join(path)} {value}: {why}", param=path[0])

"""Bodies of responses, errors as OpenAI's clients read them, and the document of all routes,
/openapi.json."""

from operator import not_
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from peagle.engine.tree import Source
from peagle.errors import InputError, shortened

TEXTS = yaml.safe_load(Path(__file__).with_name("responses.yaml").read_text())
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
    id: str
    type: Literal["function"] = "function"
    function: Function


class StreamedCall(ToolCall):
    index: int


class Message(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: Annotated[str, LeftOut] = ""  # where the target marks it
    tool_calls: Annotated[list[ToolCall], LeftOut] = []


class Delta(Answer):
    role: Annotated[Literal["assistant"] | None, LeftOut] = None
    content: Annotated[str | None, Field(exclude_if=lambda text: text is None)] = None
    reasoning: Annotated[str, LeftOut] = ""
    tool_calls: Annotated[list[StreamedCall], LeftOut] = []


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


ERRORS: Responses = {
    status: {"model": Error, "description": TEXTS[text], "headers": TEXTS["retry_after"]}
    for status, text in {"4XX": "client_errors", "5XX": "server_errors"}.items()
}
HEALTH: Responses = {n: {"model": Health, "description": "The state."} for n in (200, 503)}


def generated(model: Any) -> Responses:
    """Responses of a route that generates: `model`, or events where the body sets `stream`."""
    return {200: {"model": model, "content": TEXTS["events"]}}


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
        kind = TEXTS["types"].get(self.status_code, "invalid_request_error")
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
            other = TEXTS["gone"].get(path, TEXTS["routes"])
            return ApiError(error.status_code, f"{request.method} {path}: no such route, {other}")
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case _:
            # The connection is closed after it: clients should know.
            return ApiError(500, "the server failed: see its log", headers={"connection": "close"})


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
        return ApiError(400, "the body must be a JSON object, with content-type application/json")
    if first["type"] == "missing":
        return ApiError(400, f"{'.'.join(path)}: is missing; give it", param=path[0])
    value = shortened(repr(first["input"]))
    why = first["msg"][0].lower() + first["msg"][1:]
    return ApiError(400, f"{'.'.join(path)} {value}: {why}", param=path[0])

"""What /openapi.json says: the answers of every route, and the statuses that each can have.

The models describe answers that other modules make as plain objects; the tests hold these to them.
"""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

from peagle import __version__
from peagle.server.gate import OPEN

ABOUT = (
    "OpenAI's API with vLLM's additions, SageMaker's two routes and Prometheus' one. A field that "
    "is null counts as left out, one that is not listed is ignored, or refused where it would "
    "change the answer."
)
DATA = {"type": "string", "description": "A part of the answer as JSON, an error, or [DONE]."}
EVENT = {"type": "object", "properties": {"data": DATA}, "required": ["data"]}
EVENTS = {"text/event-stream": {"schema": EVENT}}  # where the body says `stream`
WHY = {
    400: "A field cannot be had: the message names it, its value and what to do.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here: the message says which one is.",
    408: "The body took too long to come.",
    413: "The body is too large.",
    429: "Too many requests wait: come again after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The server ends, or its engine has failed, or the answer did not begin in time.",
}


class Answer(BaseModel):
    """What a route says; nothing besides."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """As OpenAI's clients read it."""

    error: ErrorDetail


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Answer):
    object: Literal["list"]
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


class TextChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Function(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: Function


class Message(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning: str = ""  # where the target marks what it thought
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Answer):
    prompt: str


class Health(Answer):
    status: Literal["ok", "draining", "failed"]


Responses = dict[int | str, dict[str, Any]]


def told(path: str) -> dict[str, Any]:
    """What FastAPI is told of the route."""
    return {"responses": _responses(path), "openapi_extra": _extra(path)}


def _responses(path: str) -> Responses:
    generated, known = (400, 404, 429, 503), (400, 404)
    health: Responses = {n: {"model": Health, "description": "How it is."} for n in (200, 503)}
    either = Completion | ChatCompletion
    return {
        "/v1/completions": _answers({"model": Completion, "content": EVENTS}, *generated),
        "/v1/chat/completions": _answers({"model": ChatCompletion, "content": EVENTS}, *generated),
        "/invocations": _answers({"model": either, "content": EVENTS}, *generated),
        "/tokenize": _answers({"model": Tokens}, *known),
        "/detokenize": _answers({"model": Text}, *known),
        "/v1/models": _answers({"model": Models}),
        "/v1/models/{name:path}": _answers({"model": Model}, 404),
        "/metrics": _answers({"content": {"text/plain": {"schema": {"type": "string"}}}}),
        "/health": health,
        "/ping": health,
    }[path]


def _answers(good: dict[str, Any], *statuses: int) -> Responses:
    body = (408,) if 400 in statuses else ()
    bad = sorted((401, 413, 500, *body, *statuses))
    said: Responses = {status: {"model": Error, "description": WHY[status]} for status in bad}
    if 429 in said:
        seconds = {"schema": {"type": "integer"}, "description": "Seconds to wait."}
        said[429]["headers"] = {"Retry-After": seconds}
    return {200: {**good, "description": "The answer."}, **said}


def _extra(path: str) -> dict[str, Any] | None:
    """Of the routes that need no key, and of the one whose body is read only when it is known what
    it is."""
    if path in OPEN:
        return {"security": []}
    if path != "/invocations":
        return None
    either = [{"$ref": f"#/components/schemas/{name}"} for name in ("CompletionBody", "ChatBody")]
    return {"requestBody": {"content": {"application/json": {"schema": {"anyOf": either}}}}}


def describe(app: FastAPI, guarded: bool) -> None:
    """Have `app` tell of its routes what is true; `guarded` where a key is needed."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title="peagle", version=__version__, description=ABOUT, routes=app.routes
            )
            for methods in made["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)  # FastAPI's: with us it is 400
            for unused in ("HTTPValidationError", "ValidationError"):
                made["components"]["schemas"].pop(unused, None)
            if guarded:
                bearer = {"type": "http", "scheme": "bearer"}
                made["components"]["securitySchemes"] = {"key": bearer}
                made["security"] = [{"key": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]

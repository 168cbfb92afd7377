"""The responses of every route, for /openapi.json.

The tests hold the answers that `forms` and `answers` make as plain objects to these models.
"""

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

ABOUT = (
    "OpenAI's API with vLLM's additions, SageMaker's two routes and Prometheus' one. A field that "
    "is null counts as left out, one that is not listed is ignored, or refused where it would "
    "change the answer or is nearly the name of one that is."
)
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
Responses = dict[int | str, dict[str, Any]]


class Answer(BaseModel):
    """The body of a response; it has no other fields."""

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


class TextChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]


class Generated(Answer):
    id: str
    created: int
    model: str
    usage: Usage


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[TextChoice]


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
    reasoning: str = ""  # where the target marks it
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Answer):
    prompt: str


class Health(Answer):
    status: Literal["ok", "draining", "failed"]


ERRORS: Responses = {status: {"model": Error, "description": why} for status, why in WHY.items()}
ERRORS[429]["headers"] = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}
}
HEALTH: Responses = {n: {"model": Health, "description": "How it is."} for n in (200, 503)}
PLAIN_TEXT: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def generated(model: Any) -> Responses:
    """Of a route that generates: `model`, or events where the body says `stream`."""
    data = {"type": "string", "description": "A part of the answer as JSON, an error, or [DONE]."}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"model": model, "content": {"text/event-stream": {"schema": event}}}}


def complete_document(app: FastAPI, guarded: bool) -> None:
    """Make /openapi.json, once `app` has all its routes; `guarded` where a key is needed."""
    document = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's; this server sends 400
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused)
    if guarded:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]

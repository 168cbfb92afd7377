"""Bodies of responses, and the document of all routes, /openapi.json."""

from operator import not_
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from peagle.engine.tree import Source

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


class Node(Answer):
    """A draft token. Its parent is a node, numbered from 1; 0: the token before the draft."""

    text: str
    parent: int
    source: Source
    chance: float  # that the path to it is accepted, as expected


class Tree(Answer):
    """A draft that the target has verified."""

    before: str  # the token before it
    nodes: list[Node]
    accepted: list[int]  # nodes whose tokens were emitted, in order
    after: str  # the target's own token after them
    looked_up: list[int]  # nodes that lookup proposed, in order; a head may have, too
    matched: int  # newest tokens that occurred before; 0: lookup found nothing


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


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Answer):
    prompt: str


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

"""Errors as OpenAI clients read them."""

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from peagle.errors import InputError, shortened
from peagle.server.schema import REFUSED, ChatBody, CompletionBody

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
ROUTING = ("Not Found", "Method Not Allowed")  # what the framework says of it
ROUTES = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
# What sampling parameters are called here, where that is another name.
NAMES = {
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
}
FIELDS = {*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED}


class ApiError(HTTPException):
    """An answer that is an error."""

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
        self.param, self.code = param, code


def content(status: int, message: str, param: str | None = None, code: str | None = None) -> Any:
    """The body of an error."""
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def of_input(error: InputError) -> ApiError:
    """400; our messages about a field begin with its name."""
    word = str(error).split()[0].rstrip(":")
    field = NAMES.get(word, word)
    return ApiError(400, str(error), param=field if field in FIELDS else None)


def respond(request: Request, error: Exception) -> JSONResponse:
    """Any error of a route as a response."""
    if isinstance(error, InputError):
        error = of_input(error)
    elif isinstance(error, RequestValidationError | ValidationError):
        error = _of_body(error)
    if not isinstance(error, HTTPException):
        # The server closes the connection behind it: clients should know.
        said = content(500, "the server failed: see its log")
        return JSONResponse(said, 500, {"connection": "close"})
    if error.detail in ROUTING:
        why = f"{request.method} {request.url.path}: no such route, there are {ROUTES}"
        error = ApiError(error.status_code, why)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    said = content(error.status_code, str(error.detail), param, code)
    return JSONResponse(said, error.status_code, error.headers)


def _of_body(error: RequestValidationError | ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    refused = first.get("ctx", {}).get("error")
    if isinstance(refused, InputError):
        return of_input(refused)
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        why = "the body must be a JSON object, with content-type application/json"
        return ApiError(400, why)
    if first["type"] == "missing":
        return ApiError(400, f"{path[0]}: missing, it must be given", param=str(path[0]))
    value = shortened(repr(first["input"]))
    where = ".".join(map(str, path))
    return ApiError(400, f"{where} {value}: {_lower(first['msg'])}", param=str(path[0]))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]

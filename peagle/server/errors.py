"""Errors as OpenAI's clients read them."""

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from peagle.errors import InputError, shortened
from peagle.server.responses import Error, ErrorDetail

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
ROUTES = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"


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
            why = f"{request.method} {request.url.path}: no such route, there are {ROUTES}"
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

"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}} with an HTTP status.

Messages are printable, bounded, and hold no path of the server: they are made here, never from an exception that is not ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from dovetail.base.errors import InputError, SpecError, printable
from dovetail.serving.client import LOG, Busy, EngineDead, EngineRestarting

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
LONGEST = 500  # characters of a message
PATH = re.compile(r"(?<![\w.])(?:/[^\s/:;,'\"()]+){2,}/?")  # absolute


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def data(self) -> dict[str, Any]:
        """Return the error object."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        param = None if self.param is None else printable(self.param, 100)
        about = {"type": TYPES.get(self.status, fallback), "param": param, "code": self.code}
        return {"error": {"message": printable(str(self), LONGEST), **about}}

    def response(self) -> JSONResponse:
        """Return the response."""
        return JSONResponse(self.data(), self.status, self.headers)


class Unreadable(ApiError):
    """A body that does not fit the schema: the first problem that was found, and the field that has it."""

    def __init__(self, error: ValidationError) -> None:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(name) for name in first["loc"] if not str(name).startswith(("function-", "list[", "str", "dict[")))
        problem = first["msg"].removeprefix("Value error, ")
        super().__init__(400, f"{where}: {problem}" if where else problem, param=where or None)


def as_api_error(error: BaseException) -> ApiError:
    """Return the answer to any exception; the cause of an internal one is logged, not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        seconds = max(1, math.ceil(min(error.retry_after, 3600))) if math.isfinite(error.retry_after) else 1
        return ApiError(429, "the queue is full; try again later", code="queue_full", headers={"Retry-After": str(seconds)})
    if isinstance(error, EngineRestarting):
        problem = "the engine ended, and is started again; send the request again"
        return ApiError(503, problem, code="engine_restarting", headers={"Retry-After": "5"})
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has ended, and so does the server", code="engine_dead")
    if isinstance(error, ValidationError):
        return Unreadable(error)
    if isinstance(error, SpecError):
        return ApiError(400, without_paths(str(error)), param=error.path)
    if isinstance(error, InputError):
        return ApiError(400, without_paths(str(error)))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        return ApiError(400, "the request does not fit the route")
    LOG.error("internal error", exc_info=error)
    return ApiError(500, "internal error")


def without_paths(message: str) -> str:
    """Return a message of the engine or of a file's reader with each path of the server cut to its last name."""
    return PATH.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], message)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an exception of a route."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        paths = sorted({path for route in request.app.routes if "{" not in (path := route.path)})
        problem = f"{request.method} {printable(request.url.path, 80)}: no such route; there are {', '.join(paths)}"
        return ApiError(404, problem, code="route_not_found").response()
    return as_api_error(error).response()

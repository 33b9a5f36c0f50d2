"""Errors as HTTP answers: the protocol's fields, in the object and under the status that OpenAI's clients expect."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from actorpp.errors import (
    AbortedError,
    ActorppError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    StageFailedError,
)

_STATUS: tuple[tuple[type[ActorppError], int, str], ...] = (
    (InvalidRequestError, 400, "invalid_request_error"),
    (OverloadedError, 429, "rate_limit_error"),
    (DeadlineExceededError, 504, "timeout_error"),
    (AbortedError, 503, "service_unavailable_error"),
    (StageFailedError, 503, "service_unavailable_error"),
)


class HttpError(ActorppError):
    """What only HTTP can have wrong: a path, a method, a key, a model's name, a body's size."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.http_code = code


def status_of(error: ActorppError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HttpError):
        return error.status
    return next((status for kind, status, _ in _STATUS if isinstance(error, kind)), 500)


def error_object(error: ActorppError) -> dict[str, Any]:
    """``{"error": …}``, as a body and as the last frame of a stream."""
    kind = next((name for kind, _, name in _STATUS if isinstance(error, kind)), "server_error")
    if isinstance(error, HttpError) and error.status < 500:
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    code = error.http_code if isinstance(error, HttpError) else error.code
    return {"error": error.as_dict() | {"type": kind, "code": code}}


def error_response(error: ActorppError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The whole answer."""
    headers = dict(headers or {})
    if error.retryable:
        headers["Retry-After"] = str(math.ceil((error.retry_after_ms or 1000) / 1000))
    return JSONResponse(error_object(error), status_of(error), headers)

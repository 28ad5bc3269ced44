"""Errors as HTTP clients see them: OpenAI's error object, with at most 200 characters echoed.

ApiError            status, message, type, param, code: everything a client is told
|- BadRequest       400: the request is wrong; names the field
|- NotFound         404: no such model
`- Unavailable      503: queue full, shutting down, or the engine died; may say when to retry
"""

from __future__ import annotations

from typing import Any

MAX_ECHO = 200


class ApiError(Exception):
    """Ends a request with `status` and an OpenAI error body."""

    status = 500
    type = "internal_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.type, self.param, self.code)


class BadRequest(ApiError):
    """The client's mistake."""

    status = 400
    type = "invalid_request_error"


class NotFound(BadRequest):
    """A model that is not served here."""

    status = 404


class Unavailable(ApiError):
    """Nothing wrong with the request; not now."""

    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


def error_body(
    message: str, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """`{"error": {...}}` as OpenAI's clients parse it."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def echo(value: object) -> str:
    """A value of the request for an error message, cut to MAX_ECHO characters, plain ASCII."""
    text = ascii(value) if not isinstance(value, str) else ascii(value[: MAX_ECHO + 1])
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 3] + "..."

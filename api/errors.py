"""Errors as HTTP answers in OpenAI's format, for every route of the api process and for requests that reach no route."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from api.schemas.responses import ErrorBody, ErrorDetail, encoder
from engine.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


def error_body(error: RequestError) -> bytes:
    """Return the JSON of an error, for a body or an event of a stream."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return encoder.encode(ErrorBody(ErrorDetail(error.message, kind, error.param or None, error.code or None)))


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as a response. If the body was not read to its end, the connection is closed."""
    extra = dict(headers or {})
    if error.retry_after_s:
        extra["retry-after"] = str(error.retry_after_s)
    if error.status in (408, 413):
        extra["connection"] = "close"
    if error.status == 401:
        extra["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, extra, "application/json")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoder.encode(body), status, headers, "application/json")

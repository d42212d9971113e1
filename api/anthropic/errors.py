"""Errors in Anthropic's format: for the routes of its API, and on shared routes for clients that name a version of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from api.schemas.responses import encoder
from engine.errors import RequestError

if TYPE_CHECKING:
    from api.anthropic.answers import AnthropicError

VERSION_HEADER = "anthropic-version"
MESSAGES_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_spoken(path: str, headers: Headers) -> bool:
    """Return whether the client expects Anthropic's format."""
    is_shared = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") or (is_shared and VERSION_HEADER in headers)


def error_of(error: RequestError, request_id: str | None) -> AnthropicError:
    from api.anthropic.answers import AnthropicError, AnthropicErrorDetail  # most engines never need them

    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return AnthropicError(AnthropicErrorDetail(kind, error.message), request_id)


def error_body(error: RequestError, request_id: str | None) -> bytes:
    return encoder.encode(error_of(error, request_id))

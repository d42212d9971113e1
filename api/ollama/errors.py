"""Errors in Ollama's shape, for the routes of its API, and what is one in any case. Imported by every start: it imports none of
its structs."""

from __future__ import annotations

from api.schemas.responses import encoder
from engine.errors import RequestError

PREFIX = "/api/"
REFUSED_ORDERS = ("push", "create", "copy")  # what this server does not do with models


def is_spoken(path: str) -> bool:
    """Whether who asks expects Ollama's shapes."""
    return path.startswith(PREFIX)


def error_body(error: RequestError) -> bytes:
    return encoder.encode({"error": error.message})

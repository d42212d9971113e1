"""Errors in Ollama's format, for the routes of its API, and the routes that always fail. Imported at every start, so it imports
none of its structs."""

from __future__ import annotations

from api.schemas.responses import encoder
from engine.errors import RequestError

PREFIX = "/api/"
REFUSED_COMMANDS = ("push", "create", "copy")  # commands about models that this server does not support


def is_spoken(path: str) -> bool:
    """Return whether the client expects Ollama's format."""
    return path.startswith(PREFIX)


def error_body(error: RequestError) -> bytes:
    return encoder.encode({"error": error.message})

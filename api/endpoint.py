"""One route of the API: its handler, and everything for its OpenAPI description. `api/routes.py` is the table of routes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.schemas import responses

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"

ALWAYS = (400, 403, 431, 500)  # a malformed head, a foreign page, a head that is too long, a bug of ours

Handler = Callable[[Request], Awaitable[Response]]
Type = Any  # a struct, a union of structs, or the name of either: "api.module.Name"
Shapes = Sequence[Sequence[Type]]  # a body has one of these shapes; a shape is all of these structs together


class Endpoint(msgspec.Struct, frozen=True):
    """A route. Handlers and structs in modules that most engines never need are given by name, and imported on first use."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # in Starlette's syntax
    handler: Handler | str
    summary: str
    answer: Type = None  # struct of the 200 answer; None: text
    body: Shapes = ()
    event: Type = None  # struct(s) of an event, if the answer may be a stream
    error: Type = responses.ErrorBody
    errors: Sequence[int] = ALWAYS
    security: Literal["", "api_key", "admin_key"] = ""
    media_type: str = JSON
    stream_type: str = EVENTS
    is_body_required: bool = True
    unavailable: Type = None  # struct of a 503 answer that is not an error body
    is_refused: bool = False  # always rejected
    form: Type = None  # struct of the fields of a multipart body, in addition to its file
    accepted: str = ""  # meaning of a 202 answer, if there is one
    other_methods: tuple[str, ...] = ()  # also accepted, but not described

    @property
    def public_path(self) -> str:
        """The path in OpenAPI's syntax."""
        return self.path.replace(":path}", "}")

    @property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"{(\w+)}", self.public_path)


def found(name: Any) -> Any:
    """Import an object named as `api.module.Name`; return anything else unchanged."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def on_first_use(name: str) -> Handler:
    """Return a handler that imports its module on the first request."""

    async def handle(request: Request) -> Response:
        handler: Handler = found(name)
        return await handler(request)

    return handle

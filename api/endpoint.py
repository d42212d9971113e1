"""One route of the API: what answers it, and all that its OpenAPI description needs. The table of them is `api/routes.py`."""

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

ALWAYS = (400, 403, 431, 500)  # a malformed head, a foreign page, too long a head, an error of ours

Handler = Callable[[Request], Awaitable[Response]]
Type = Any  # a struct, a union of structs, or the name of either: "api.module.Name"
Shapes = Sequence[Sequence[Type]]  # a body has one of these shapes; a shape is all of these structs together


class Endpoint(msgspec.Struct, frozen=True):
    """Handlers and structs of modules that most engines never need are named, and imported where they are first asked for."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # as Starlette writes it
    handler: Handler | str
    summary: str
    answer: Type = None  # struct of the 200 answer; None: text
    body: Shapes = ()
    event: Type = None  # struct of an event, or several, where the answer may be a stream
    error: Type = responses.ErrorBody
    errors: Sequence[int] = ALWAYS
    security: Literal["", "api_key", "admin_key"] = ""
    media_type: str = JSON
    stream_type: str = EVENTS
    is_body_required: bool = True
    unavailable: Type = None  # struct of a 503 answer that is no error body
    is_refused: bool = False  # in any case
    form: Type = None  # struct of the fields of a multipart body, beside its file
    accepted: str = ""  # what a 202 answer means, where there is one
    other_methods: tuple[str, ...] = ()  # that the same handler answers, and no description names

    @property
    def public_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")

    @property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"{(\w+)}", self.public_path)


def found(name: Any) -> Any:
    """Import what is named `api.module.Name`; anything else is what was asked for already."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def on_first_use(name: str) -> Handler:
    """A handler whose module is imported by its first request."""

    async def handle(request: Request) -> Response:
        handler: Handler = found(name)
        return await handler(request)

    return handle

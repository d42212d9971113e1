"""One HTTP request in a route handler: its id, time and body, and the services it may use.

Created by `app.App` for every request of the api process; handlers get it with `RequestContext.of(request)`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from api.body_budget import GRACE_NS, LEAST_BODY_BYTES_PER_S, BodyBudget, BodyShare
from api.client.client import EngineClient
from api.client.generation import ClientGone, Generation
from api.fingerprint import Fingerprints
from api.json_body import BodyDecoder
from api.media.request import MediaRequests
from api.model import ServedModel
from api.prometheus import Renderings
from api.schemas import requests
from api.watch import Watch
from engine.errors import RequestError
from engine.messages import Prompt
from engine.process.context import ActorContext
from engine.process.control_client import ControlClient

if TYPE_CHECKING:
    from api.request_log import RequestLog
    from api.span import SpanContext
    from api.spans import Spans

SCOPE_KEY = "tokamak.request_context"
ABORT_KEY = "tokamak.abort_connection"

T = TypeVar("T", bound=msgspec.Struct)
F = TypeVar("F")


class Services(msgspec.Struct, frozen=True):
    """Services that the handlers of one api process share."""

    context: ActorContext
    client: EngineClient
    model: ServedModel
    control: ControlClient
    decoder: BodyDecoder
    bodies: BodyBudget
    media: MediaRequests
    watch: Watch
    renderings: Renderings
    fingerprints: Fingerprints
    features: Mapping[type, object]  # objects shared by the routes of a folder, by type
    request_log: RequestLog | None = None  # if requests are logged
    spans: Spans | None = None  # if spans are collected

    def feature(self, type_: type[F]) -> F:
        """Return the object of this type that the routes of its folder share."""
        return cast(F, self.features[type_])


class RequestContext:
    def __init__(self, services: Services, request_id: str, key: str, source: str = "") -> None:
        self.services = services
        self.request_id = request_id  # as known to the client
        self.key = key  # unique in the run
        self.source = source  # from `api.access.source_of`
        self.arrival_ns = time.monotonic_ns()
        self.generation: Generation | None = None  # its request to the engine
        self.span: SpanContext | None = None  # of its span, if it has one

    @staticmethod
    def of(request: Request) -> RequestContext:
        return cast(RequestContext, request.scope[SCOPE_KEY])

    def opened(self, generation: Generation, prompts: Sequence[Prompt]) -> Generation:
        """Note that the engine has accepted the request."""
        self.generation = generation
        if self.services.request_log is not None:
            self.services.request_log.on_opened(self.request_id, generation, prompts)
        return generation

    async def fields(self, request: Request, default: bytes = b"") -> dict[str, Any]:
        """Return the body as a JSON object; `default` if it is empty."""
        with self.services.bodies.share(self.source, self.arrival_ns) as share:
            return await self.services.decoder.decode(await self._body(request, share) or default)

    async def parse(self, request: Request, type_: type[T], default: bytes = b"") -> T:
        _, body = await self.parse_with_fields(request, type_, default)
        return body

    async def parse_with_fields(self, request: Request, type_: type[T], default: bytes = b"") -> tuple[dict[str, Any], T]:
        """Parse the body and return its raw fields too."""
        fields = await self.fields(request, default)
        body = requests.convert(fields, type_)
        await asyncio.sleep(0)  # the next steps may take as long
        return fields, body

    async def _body(self, request: Request, share: BodyShare) -> bytearray:
        """Return the whole body. Raises 413 as soon as it exceeds the limit, 408 if it arrives too slowly, 503 if other bodies
        hold too much, and `ClientGone`."""
        limit = self.services.context.config.max_body_bytes
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        body = bytearray()
        is_last = False
        while not is_last:
            part, is_last = await next_part(request.receive, (share.deadline_ns - time.monotonic_ns()) / 1e9, share)
            body += part
            if len(body) > limit:
                raise _too_large(limit)
            share.grow_to(len(body))
        return body


async def next_part(receive: Receive, timeout_s: float, share: BodyShare | None = None) -> tuple[bytes, bool]:
    """Return more of a body, and whether it is the last part. Raises RequestError (408) if it arrives too slowly, and
    ClientGone."""
    arriving = asyncio.ensure_future(receive())
    if share is not None:
        share.arriving = arriving
    try:
        await asyncio.wait((arriving,), timeout=max(0.0, timeout_s))
        if not arriving.done() or arriving.cancelled():
            raise _too_slow(share is not None and share.is_displaced)
        message = arriving.result()
    finally:
        arriving.cancel()
        if share is not None:
            share.arriving = None
    if message["type"] == "http.disconnect":
        raise ClientGone("the client disconnected before the body was complete")
    return message.get("body", b""), not message.get("more_body", False)


async def leave_with_client(generation: Generation, receive: Receive) -> None:
    """Abort a generation as soon as its client disconnects. Run as a task, after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.leave()


async def until_finished(generation: Generation, receive: Receive) -> None:
    """Wait for a whole answer. Raises `RequestError` if the engine rejected it, `ClientGone` if the client disconnected."""
    watch = asyncio.create_task(leave_with_client(generation, receive))
    try:
        await generation.wait()
    finally:
        watch.cancel()
        generation.close()


def _too_slow(is_displaced: bool) -> RequestError:
    why = ", and the server needed memory for others" if is_displaced else f" and is over {GRACE_NS // 10**9} s late"
    return RequestError(
        f"the body arrived slower than {LEAST_BODY_BYTES_PER_S} bytes/s{why}; send it again", status=408, code="timeout"
    )


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body exceeds the limit of {limit} bytes", status=413, code="body_too_large")

"""The ASGI application of the api process, which handles every request.

Read `App.__call__` for what happens to each request, `api/routes.py` for the routes.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from api.access import GIVEN_KEY, LOCAL_ORIGIN, Access, Given, source_of
from api.anthropic import errors as anthropic_errors
from api.batches.runner import Answer
from api.client.generation import ClientGone
from api.durations import Durations
from api.errors import error_response
from api.ollama import errors as ollama_errors
from api.request_context import ABORT_KEY, SCOPE_KEY, RequestContext, Services
from api.routes import routes
from engine.errors import RequestError
from engine.process.log import printable

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
MAX_REQUEST_ID = 128  # characters
MAX_UNREAD_BYTES = 64 << 10  # unread rest of a body; uvicorn's high-water mark
_TRACKER_KEY = "tokamak.response_tracker"
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("x-request-id", "x-tokamak-weight-version", "x-tokamak-replica", "retry-after", "traceparent", "x-tokamak-dropped")


class App:
    """Gives each request an id, checks access, counts it, and turns every error into an answer."""

    def __init__(self, services: Services) -> None:
        context = services.context
        self._services = services
        self._access = Access(context.config)
        self._root_path = context.config.root_path
        self._router = Router(routes=routes(), redirect_slashes=False)
        self._shared = CORSMiddleware(
            self._enter,
            allow_origins=self._access.origins,
            allow_origin_regex=LOCAL_ORIGIN,
            allow_methods=_METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )
        self._requests = context.counter("http_requests_total")
        self._disconnects = context.counter("http_disconnects_total")
        self._durations = Durations(context)
        self._responses = {status: context.counter("http_responses_total", status=f"{status}xx") for status in (2, 4, 5)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_ns = time.monotonic_ns()
        tracker = scope[_TRACKER_KEY] = _ResponseTracker(self, receive, send)
        self._requests.add(1)
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):  # a proxy that keeps the prefix
            scope["path"] = scope["path"][len(self._root_path) :]
        origin = Headers(scope=scope).get("origin")
        is_shared = origin is not None and self._access.is_shared(scope["path"], origin)
        try:
            await (self._shared if is_shared else self._enter)(scope, tracker.receive, tracker.send)
        finally:
            self._on_end(scope, tracker, time.monotonic_ns() - begin_ns)

    async def ask(self, path: str, body: bytes, given: Given) -> Answer:
        """Answer a POST from this process itself. Cancelling the waiting task aborts it."""
        head: dict[str, Any] = {"status": 0}
        parts: list[bytes] = []
        unread = [body]
        never = asyncio.Event()  # the caller does not disconnect

        async def receive() -> Message:
            if not unread:
                await never.wait()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                parts.append(message.get("body", b""))

        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            ABORT_KEY: lambda: None,
            GIVEN_KEY: given,
        }
        await self(scope, receive, send)
        request_id = dict(head.get("headers", ())).get(b"x-request-id", b"").decode()
        return Answer(head["status"], b"".join(parts), request_id)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracker = scope[_TRACKER_KEY]
        try:
            scope["app"] = self  # so that the router raises exceptions for unknown paths
            headers = Headers(scope=scope)
            given_id = headers.get("x-request-id")
            source = source_of(HTTPConnection(scope), self._services.context.config)
            scope[SCOPE_KEY] = tracker.context = self._new_context(given_id, source)
            if self._services.spans is not None and scope["method"] == "POST":
                tracker.context.span = self._services.spans.begin(scope["path"], headers)
            if GIVEN_KEY not in scope:
                self._access.check(scope["path"], headers)
            await self._router(scope, receive, send)
            return
        except ClientGone:
            return
        except RequestError as error:
            refusal = _refusal(tracker, scope, error)
        except HTTPException as error:
            allowed = {"allow": self._methods_of(scope)} if error.status_code == 405 else error.headers
            refusal = _refusal(tracker, scope, _router_error(error, scope), allowed)
        except Exception as error:
            self._services.context.log.exception("%s %s failed", scope["method"], scope["path"])
            text = printable(f"{type(error).__name__}: {error}")
            self._services.context.counters.errors.record(self._services.context.name, text)
            refusal = _refusal(tracker, scope, RequestError("internal error", status=500, code="internal_error"))
        if not tracker.status:  # otherwise the server closes the connection
            await refusal(scope, receive, send)

    def _on_end(self, scope: Scope, tracker: _ResponseTracker, duration_ns: int) -> None:
        self._durations.observe(scope["path"], tracker.status, duration_ns)
        log, context = self._services.request_log, tracker.context
        if context is not None and context.generation is not None:
            context.generation.answered()
        if context is not None and context.span is not None and self._services.spans is not None:
            generation = context.generation
            self._services.spans.finish(context.span, scope["path"], context.request_id, tracker.status, generation)
        if log is not None and context is not None and scope["method"] != "GET":
            log.on_answered(context.request_id, scope["method"], scope["path"], tracker.status, duration_ns, context.generation)

    def count_response(self, status: int) -> None:
        if status // 100 in self._responses:
            self._responses[status // 100].add(1)

    def count_disconnect(self) -> None:
        self._disconnects.add(1)

    def _methods_of(self, scope: Scope) -> str:
        """Return the methods of a path, of all its routes: the router names those of the first."""
        found = [route for route in self._router.routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({method for route in found if isinstance(route, Route) for method in route.methods or ()}))

    def _new_context(self, given: str | None, source: str) -> RequestContext:
        """`given`: a client's own id, sanitized for logs and headers."""
        if given:
            given = _UNSAFE.sub("_", given[:MAX_REQUEST_ID])
            return RequestContext(
                self._services, given, f"{given}~{secrets.token_hex(4)}", source
            )  # two clients may choose the same
        made = uuid.uuid4().hex
        return RequestContext(self._services, made, made, source)


class _ResponseTracker:
    """Watches a request's ASGI channels: the answer, and whether the client disconnected before."""

    __slots__ = ("_app", "_has_left", "_is_complete", "_receive", "_send", "context", "status")

    def __init__(self, app: App, receive: Receive, send: Send) -> None:
        self._app = app
        self._receive = receive
        self._send = send
        self._is_complete = False
        self._has_left = False
        self.status = 0  # of the answer; 0: not begun
        self.context: RequestContext | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_complete and not self._has_left:
            self._has_left = True
            self._app.count_disconnect()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._app.count_response(self.status)
            if self.context is not None:
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = self.context.request_id
                if self.context.span is not None:
                    headers["traceparent"] = self.context.span.traceparent
        elif not message.get("more_body", False):
            if len(message.get("body", b"")) > MAX_UNREAD_BYTES:
                await self._send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}  # waits until the client has read the rest
            self._is_complete = True
        await self._send(message)


def _refusal(
    tracker: _ResponseTracker, scope: Scope, error: RequestError, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error in the format of the request's API."""
    response = error_response(error, headers)
    if anthropic_errors.is_spoken(scope["path"], Headers(scope=scope)):
        request_id = tracker.context.request_id if tracker.context is not None else None
        response.body = anthropic_errors.error_body(error, request_id)
    elif ollama_errors.is_spoken(scope["path"]):
        response.body = ollama_errors.error_body(error)
    response.headers["content-length"] = str(len(response.body))
    return response


def _router_error(error: HTTPException, scope: Scope) -> RequestError:
    """Return 404 or 405 in OpenAI's format."""
    place = f"{scope['method']} {scope['path']}"
    if error.status_code == 405:
        return RequestError(f"{place}: method not allowed", status=405, code="method_not_allowed")
    return RequestError(f"{place}: not found", status=error.status_code, code="not_found")

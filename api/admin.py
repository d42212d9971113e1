"""`/admin`: an operator's orders over HTTP, each handed to the supervisor as `tokamak ctl` does, answered when it is done.

Runs in the api process. With `--admin-key` the key opens it from anywhere; without one only a direct caller on this machine may
enter, and no web page that a browser on this machine happens to show.
"""

from __future__ import annotations

import ipaddress
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.auth import has_key
from api.errors import json_response
from api.exchange import Exchange
from api.schemas import requests
from api.schemas.requests import AbortRequestBody, EmptyRequest, PauseRequest, ReloadRequest
from engine.errors import ControlError, RequestError
from engine.messages import (
    AbortRequest,
    DropWeights,
    ListActors,
    Order,
    Pause,
    ReloadWeights,
    ResetPrefixCache,
    RestartActor,
    Resume,
)

_FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")

T = TypeVar("T", bound=msgspec.Struct)


def check_access(request: Request, admin_key: str) -> None:
    """401 or 403 for whoever may not give orders."""
    if admin_key:
        if not has_key(request.headers, (admin_key,)):
            raise RequestError(
                "wrong or missing admin key; send it as `Authorization: Bearer KEY`", status=401, code="invalid_admin_key"
            )
        return
    if not _is_loopback(request.client.host if request.client else ""):
        raise _forbidden("/admin answers only this machine; start with --admin-key to open it to others")
    if any(name in request.headers for name in _FORWARDING_HEADERS):
        raise _forbidden("/admin does not answer through a proxy; start with --admin-key")
    host = request.headers.get("host", "")
    if not _is_local_name(host):
        raise _forbidden(
            f"/admin does not answer under the name {host!r}, which a foreign page could have chosen; use 127.0.0.1"
        )
    origin = request.headers.get("origin")
    if (origin is not None and urlsplit(origin).netloc != host) or request.headers.get("sec-fetch-site") == "cross-site":
        raise _forbidden("/admin does not answer pages of another origin")


async def list_actors(request: Request) -> Response:
    return await _carry_out(request, ListActors())


async def restart_actor(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    return await _carry_out(request, RestartActor(request.path_params["name"]))


async def pause(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, Pause(body.mode))


async def sleep(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, Pause(body.mode, level="sleep"))


async def resume(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    return await _carry_out(request, Resume())


async def reset_prefix_cache(request: Request) -> Response:
    await _parse(request, EmptyRequest)
    return await _carry_out(request, ResetPrefixCache())


async def reload_weights(request: Request) -> Response:
    body = await _parse(request, ReloadRequest)
    return await _carry_out(request, ReloadWeights(body.path, body.mode, body.ranks))


async def clear_weights(request: Request) -> Response:
    body = await _parse(request, PauseRequest)
    return await _carry_out(request, DropWeights(body.mode))


async def abort_request(request: Request) -> Response:
    """By the id that the client was given. Another api process's requests are reached through the engine."""
    exchange = Exchange.of(request)
    body = await _parse(request, AbortRequestBody)
    if exchange.services.client.abort(body.request_id):
        return json_response({"message": f"request {body.request_id} is aborted"})
    return await _carry_out(request, AbortRequest(body.request_id))


async def _parse(request: Request, type_: type[T]) -> T:
    """A body whose every field has a default may be empty."""
    body = await Exchange.of(request).body(request)
    return requests.parse(body or (b"{}" if type_ is not AbortRequestBody else body), type_)


async def _carry_out(request: Request, order: Order) -> Response:
    services = Exchange.of(request).services
    try:
        reply = await services.control.ask_async(order, services.context.config.load_timeout_s)
    except ControlError as error:
        raise RequestError(str(error), status=503, code="no_answer") from None
    if reply.status >= 400:
        raise RequestError(reply.message, status=reply.status, code="order_refused")
    return json_response({"message": reply.message, **reply.details}, reply.status)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_local_name(host: str) -> bool:
    """A numeric address or localhost: a name that no DNS server can point elsewhere."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _forbidden(message: str) -> RequestError:
    return RequestError(message, status=403, code="forbidden")

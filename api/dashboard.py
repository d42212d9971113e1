"""`GET /dashboard`, `/dashboard/logs/{actor}`: state of the engine, for the web page.

Runs in the api process without involving others (see `watch.py`).
"""

from __future__ import annotations

import asyncio
import os

from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.request_context import RequestContext
from api.schemas.responses import ActorLog
from engine.errors import RequestError

LOG_TAIL_BYTES = 16 << 10


async def dashboard(request: Request) -> Response:
    """Handle `GET /dashboard`."""
    return json_response(await RequestContext.of(request).services.watch.document())


async def show_log(request: Request) -> Response:
    """Handle the route: return the last whole lines of an actor's log."""
    context = RequestContext.of(request).services.context
    name = request.path_params["actor"]
    if name not in {actor.name for actor in context.counters.actors()}:
        raise RequestError(f"{name[:64]!r} is not an actor; /dashboard lists all actors", status=404, code="not_found")
    path = context.run.log_path(name)
    return json_response(ActorLog(name, await asyncio.to_thread(_tail, str(path))))


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES)
    except OSError:
        return ""  # it has written nothing, or the run's files are gone
    if size > LOG_TAIL_BYTES:
        text = text.partition(b"\n")[2]
    return text.decode(errors="replace")

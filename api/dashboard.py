"""`GET /dashboard`, `/dashboard/logs/{actor}`: what the engine is doing, for the page.

Runs in the api process and asks no other (see `watch.py`).
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
    """The route."""
    return json_response(await RequestContext.of(request).services.watch.document())


async def show_log(request: Request) -> Response:
    """The route: the end of what an actor wrote, in whole lines."""
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

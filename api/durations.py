"""Durations of requests, by route and class of status. Written by `app.App` in the api process."""

from __future__ import annotations

from engine.metric_labels import HTTP_ROUTES, HTTP_STATUSES, OTHER_ROUTE
from engine.process.context import ActorContext
from shm.counters import HistogramCells

_ROUTES = frozenset(HTTP_ROUTES)
_BEGINNINGS = tuple((route, f"{route}/") for route in HTTP_ROUTES)


def route_of(path: str) -> str:
    """Return the route under which a path is counted."""
    if path in _ROUTES:
        return path
    return next((route for route, beginning in _BEGINNINGS if path.startswith(beginning)), OTHER_ROUTE)


class Durations:
    """Duration histograms. Cells are opened with the first request that they count."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._cells: dict[tuple[str, str], HistogramCells] = {}

    def observe(self, path: str, status: int, duration_ns: int) -> None:
        """Count a request that was answered completely, or as far as its client read. `status` 0: it disconnected before the
        answer began."""
        key = route_of(path), f"{status // 100}xx"
        cells = self._cells.get(key)
        if cells is None:
            if key[1] not in HTTP_STATUSES:
                return
            name = "http_request_duration_seconds"
            cells = self._cells[key] = self._context.histogram(name, route=key[0], status=key[1])
        cells.observe(duration_ns / 1e9)

"""Snapshots of the engine in one api process: the data of `tokamak top`, as JSON. Used by `dashboard.py`.

Everything comes from shared memory and /proc; no actor is involved. At most one snapshot is taken per `MIN_INTERVAL_NS`,
outside the event loop, and none without requests.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from engine.process.context import ActorContext

if TYPE_CHECKING:
    from engine.observation.figures import History
    from engine.observation.observer import Observer

MIN_INTERVAL_NS = 500_000_000


class Watch:
    """State of the engine for the dashboard; its imports happen on first use."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self._taken_ns = 0
        self._document: dict[str, Any] = {}
        self._observer: Observer | None = None
        self._history: History | None = None

    async def document(self) -> dict[str, Any]:
        """Return the latest snapshot, taken now if it is older than `MIN_INTERVAL_NS`."""
        async with self._turn:
            if time.monotonic_ns() - self._taken_ns >= MIN_INTERVAL_NS:
                self._document = await asyncio.to_thread(self._look)
                self._taken_ns = time.monotonic_ns()
        return self._document

    def _look(self) -> dict[str, Any]:
        from engine.observation.figures import History
        from engine.observation.observer import Observer

        config = self._context.config
        if self._observer is None or self._history is None:
            shown = {"shares_experts": config.enable_expert_parallel, "has_adapters": bool(config.max_loras)}
            self._observer = Observer(self._context.run, **shown)
            self._history = History()
        now = self._observer.snapshot()
        parts = ("actors", "rings", "errors", "experts", "placement_version", "adapters", "engines")
        return {
            "taken_ns": now.taken_ns,
            "figures": msgspec.to_builtins(self._history.add(now)),
            **{name: msgspec.to_builtins(getattr(now, name)) for name in parts},
            "model": config.served_model_name[0] if config.served_model_name else config.model,
            "device": config.device,
            "kernels": config.kernels_text,
            "has_admin_key": bool(config.admin_key),
        }

"""Capabilities of a device, and the error for those that it lacks. Found by the devices (`device.py`, `paddle.py`)."""

from __future__ import annotations

import msgspec


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities of one device."""

    place: str  # as the device calls itself
    has_graphs: bool  # what was captured is replayed
    is_arena_lasting: bool  # what the cache holds outlives the worker
    dtypes: tuple[str, ...]  # of DEVICE_DTYPES those in which it multiplies

    @property
    def text(self) -> str:
        graphs = "graphs" if self.has_graphs else "no graphs"
        arena = "the cache outlives the worker" if self.is_arena_lasting else "the cache ends with the worker"
        return f"{self.place}: {graphs}, {arena}, {' '.join(self.dtypes) or 'no data type'}"


class DeviceError(Exception):
    """A device does not do what was asked of it."""

"""Capabilities of a device, and the error if it lacks one. Found by the devices (`device.py`, `paddle.py`)."""

from __future__ import annotations

import msgspec

from engine.errors import TokamakError


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities of one device."""

    place: str  # name that the device reports
    has_graphs: bool  # captures can be replayed
    is_arena_lasting: bool  # the KV cache outlives the worker
    dtypes: tuple[str, ...]  # those of DEVICE_DTYPES in which it multiplies

    @property
    def text(self) -> str:
        graphs = "graphs" if self.has_graphs else "no graphs"
        arena = "the cache outlives the worker" if self.is_arena_lasting else "the cache ends with the worker"
        return f"{self.place}: {graphs}, {arena}, {' '.join(self.dtypes) or 'no data type'}"


class DeviceError(TokamakError):
    """A device cannot do a requested operation."""


class FullDeviceError(DeviceError):
    """The memory of a device is used up."""

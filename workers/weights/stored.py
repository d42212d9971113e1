"""Weights of tables that store packed modules as bytes with records (`ops/cuda/stored.py`): into a file of the weight cache,
from it to the device, and from the device if that still has them.

Used by `packing.py`, one per load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ops.modules import Module
from ops.weight_format import Source, Store
from workers.weights.packed_file import DamagedFileError, FileWriter, PackedFile
from workers.weights.reader import digest_of

if TYPE_CHECKING:
    from ops.cuda.stored import Room, Stored


class Through(Protocol):
    """Takes the modules of a load, in order."""

    def pass_on(self, module: Module, sources: Mapping[str, Source]) -> None: ...

    def finish(self) -> None: ...


class StoredWeights:
    """The weights of one load, by the functions of `stored`."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def find(self, key: str, modules: Sequence[Module]) -> dict[str, Any] | None:
        """Give `modules` the weights that the device still has, with this `key`. Return their manifest; None: it has none."""
        found = self._stored.find(key)
        if found is None:
            return None
        room, content = found
        manifest: dict[str, Any] = json.loads(content)
        for module, (place, _), record in zip(modules, _places(manifest["sizes"]), manifest["records"], strict=True):
            self._stored.put(module, record, room.address + place, room)
        return manifest

    def through(self, store: Store) -> Through | None:
        """Return what takes modules into a new file, or from one to the device; None: they are packed for the device."""
        match store:
            case FileWriter():
                return _ToFile(self._stored, store)
            case PackedFile():
                return _FromFile(self._stored, store)
            case _:
                return None


class _ToFile:
    def __init__(self, stored: Stored, file: FileWriter) -> None:
        self._stored, self._file = stored, file
        self._sizes: list[int] = []
        self._records: list[Any] = []

    def pass_on(self, module: Module, sources: Mapping[str, Source]) -> None:
        record, pieces = self._stored.take(copy_of(module), sources)
        size, fills = sum(map(len, pieces)), [(len(piece), partial(_fill, piece)) for piece in pieces]
        self._file.keep(str(len(self._sizes)), (size,), np.dtype(np.uint8), fills)
        self._sizes.append(size)
        self._records.append(record)

    def finish(self) -> None:
        self._file.description |= {"sizes": self._sizes, "records": self._records}


class _FromFile:
    def __init__(self, stored: Stored, file: PackedFile) -> None:
        self._stored, self._file, about = stored, file, file.description
        self._places, self._records = _places(about["sizes"]), about["records"]
        self._room: Room = stored.room(sum(about["sizes"]))
        self._number = 0

    def pass_on(self, module: Module, sources: Mapping[str, Source]) -> None:
        (begin, end), record = self._places[self._number], self._records[self._number]
        address = self._room.address + begin
        values = self._file.keep(str(self._number), (end - begin,), np.dtype(np.uint8), _nothing)
        self._stored.write(address, values)
        self._stored.put(module, record, address, self._room)
        self._number += 1

    def finish(self) -> None:
        """Keep the weights, now that all of them are on the device."""
        if trouble := self._file.trouble():
            raise DamagedFileError(trouble)
        about = {name: self._file.description[name] for name in ("formats", "sizes", "records")}
        self._stored.keep(self._room, digest_of(self._file.description["of"]), json.dumps(about).encode())


def copy_of(module: Module) -> Module:
    """Return a copy that can be packed while `module` stays as it is."""
    copied = copy(module)
    if hasattr(copied, "linear"):
        copied.linear = copy(copied.linear)
    return copied


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(np.cumsum([0, *sizes]).tolist()))


def _fill(values: np.ndarray, array: np.ndarray) -> None:
    array[...] = values


def _nothing(array: np.ndarray) -> None:
    raise AssertionError("a stored array is not filled again")

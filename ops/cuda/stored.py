"""Packed modules as bytes and a record of what they consist of, from which later loads make them again without packing.

Used by `workers/weights/packing.py`. A record is of plain values (JSON). Arrays are given by their places in the bytes of their
module; small arrays of the host are in the record itself. Nothing here knows the layout of weights, which is `Packer`'s.
"""

from __future__ import annotations

import base64
import hashlib
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ops.cuda import packing
from ops.cuda.array import CardMemory, CudaArray, array_on
from ops.cuda.packing import PackedExperts, PackedLinear, Packer
from ops.modules import Embedding, Experts, LayerNorm, Linear, Module, PositionTable, Router
from ops.weight_format import Memory, Source

_ALIGNMENT = 512  # bytes, of each array
_TUPLES = {kind.__name__: kind for kind in (PackedLinear, PackedExperts)}
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Linear: ("weight", "bias"),
    LayerNorm: ("weight", "bias"),
    PositionTable: ("values",),
    Router: ("linear.weight", "linear.bias", "correction", "scales"),
    Experts: ("weight",),
}
Record = dict[str, Any] | None  # by attribute; None: the module has the weights of another one


class Room(Protocol):
    """Memory of a card for the modules of a load, free again when this object is deleted."""

    address: int


class Holder(Protocol):
    """Keeps loaded weights beyond the end of this process (`workers/devices/cuda/shelf.py`)."""

    def room(self, num_bytes: int) -> Room | None:
        """Return memory that can be kept; None: there is none."""

    def keep(self, room: Room, key: str, manifest: bytes) -> None:
        """Let other lives of this rank find the contents of `room`, which are complete, under `key`. No effect if they are in
        other memory than that of `room()`."""

    def find(self, key: str) -> tuple[Room, bytes] | None:
        """Return what is kept under `key`; what is kept under another one and not used by this process is dropped."""


class Stored:
    """Modules in the `memory` of a card. `dtype`: of activations. `holder`: None: memory ends with this process."""

    def __init__(self, memory: CardMemory, dtype: str, holder: Holder | None = None) -> None:
        self._memory, self._dtype, self._holder = memory, dtype, holder
        self.float_bits = 32 if dtype == "float32" else 16

    def layout(self) -> str:
        """Describe the bytes: they follow the sources that make them."""
        digest = hashlib.blake2b(self._dtype.encode(), digest_size=16)
        for file in (packing.__file__, __file__):
            digest.update(Path(file).read_bytes())
        return digest.hexdigest()

    def take(self, module: Module, sources: Mapping[str, Source]) -> tuple[Record, list[np.ndarray]]:
        """Pack a module on the host. Return its record and the pieces of its bytes; the next module may follow them."""
        if _is_shared(module):
            return None, []
        pieces = _Pieces()
        Packer(pieces, self._dtype).pack(module, sources, Memory())
        found = {name: _record(operator.attrgetter(name)(module)) for name in _attributes(module)}
        return found, pieces.whole()

    def room(self, num_bytes: int) -> Room:
        """Return memory for so many bytes."""
        room = None if self._holder is None else self._holder.room(num_bytes)
        if room is None:
            _, room = self._memory.allocate(num_bytes, is_lasting=True)
        return room

    def write(self, address: int, values: np.ndarray) -> None:
        self._memory.write(address, values)

    def put(self, module: Module, record: Record, address: int, room: Room) -> None:
        """Give the module its weights, the bytes of which are at `address` in `room`."""
        if record is None:
            Packer(self._memory, self._dtype).pack(module, {}, Memory())
            return
        for name, value in record.items():
            owner, _, attribute = name.rpartition(".")
            setattr(operator.attrgetter(owner)(module) if owner else module, attribute, self._value(value, address, room))

    def keep(self, room: Room, key: str, manifest: bytes) -> None:
        if self._holder is not None:
            self._holder.keep(room, key, manifest)

    def find(self, key: str) -> tuple[Room, bytes] | None:
        return None if self._holder is None else self._holder.find(key)

    def _value(self, record: Any, address: int, room: Room) -> Any:
        match record:
            case {"place": place, "shape": shape, "dtype": dtype}:
                return CudaArray(self._memory, address + place, shape, dtype, room)
            case {"zeros": shape}:
                return array_on(self._memory, np.zeros(shape, np.int32))
            case {"values": text, "shape": shape, "dtype": dtype}:
                return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
            case {"tuple": name, "fields": fields}:
                return _TUPLES[name](*(self._value(field, address, room) for field in fields))
            case _:
                return record


def _attributes(module: Module) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(module, kind)), ("weight",))


def _is_shared(module: Module) -> bool:
    return isinstance(module, Embedding) and module.tied is not None and not module.tied.columns


def _record(value: Any) -> Any:
    match value:
        case CudaArray():
            return {"place": value.address, "shape": value.shape, "dtype": value.dtype}
        case np.ndarray():
            text = base64.b64encode(value.tobytes()).decode()
            return {"values": text, "shape": list(value.shape), "dtype": value.dtype.str}
        case tuple():
            return {"tuple": type(value).__name__, "fields": [_field(each) for each in value]}
        case _:
            return value


def _field(value: Any) -> Any:
    """Return the record of a part of a linear. Integers of 32 bits are counters of its kernels, not weights: a killed process
    may leave others than zeros there."""
    if isinstance(value, CudaArray) and value.dtype == "int32":
        return {"zeros": value.shape}
    return _record(value)


class _Pieces:
    """Memory of the host, from address 0 on, that is written once and in order (`CardMemory`)."""

    def __init__(self) -> None:
        self._found: list[np.ndarray] = []
        self._num_bytes = self._num_given = 0

    def allocate(self, num_bytes: int, *, is_lasting: bool = False) -> tuple[int, Any]:
        address = self._num_given
        self._num_given += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return address, None

    def host_address(self, values: np.ndarray) -> int:
        raise AssertionError("packing lends nothing to the card")

    def write(self, address: int, values: np.ndarray) -> None:
        assert address >= self._num_bytes, "arrays are written in order"
        values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._found += [np.zeros(address - self._num_bytes, np.uint8), values]
        self._num_bytes = address + len(values)

    def read(self, address: int, values: np.ndarray) -> None:
        raise AssertionError("packing reads nothing back")

    def whole(self) -> list[np.ndarray]:
        """Return what was written and what lies between, up to the end of the memory that was given."""
        return [piece for piece in (*self._found, np.zeros(self._num_given - self._num_bytes, np.uint8)) if len(piece)]

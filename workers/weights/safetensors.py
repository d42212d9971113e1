"""One `.safetensors` file, mapped read-only: its header checked, its tensors as float32 arrays.

Used by the loader. The format (https://huggingface.co/docs/safetensors):

    0        8                8 + n                          end of file
    +--------+----------------+--------------------------------------+
    | n: u64 | n bytes of JSON | data                                 |
    +--------+----------------+--------------------------------------+
    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end)}, ..., "__metadata__": {"format": "pt"}}
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.checkpoint.files import MappedFile, map_file
from engine.errors import CheckpointError
from ops.weight_format import QuantizedWeight, WeightFormat

_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
# bound the cost of regular expressions on names and of products of shapes
_MAX_NAME_CHARACTERS, _MAX_DIMENSIONS, _MAX_SIZE = 1024, 16, 1 << 62
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
    "U16": np.dtype("<u2"),  # bfloat16, as Paddle writes it from numpy
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
FLOATS = ("F32", "F16", "F64", "BF16", "U16")
SCALES = (*FLOATS, "F8_E8M0", "U8")  # of 8-bit floats (see `as_scales`)
_BFLOAT16 = ("BF16", "U16")


def header_of(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file with these tensors (name, dtype, shape), one after another, up to its data."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * _DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _PREFIX_BYTES)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


class StoredTensor(msgspec.Struct, frozen=True):
    """Entry of a tensor in a file; [begin, end) are bytes of the file."""

    data: mmap.mmap  # not the file object, so that memory is freed with the last tensor, without a garbage collection
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def is_float(self) -> bool:
        """Whether its numbers are plain weights; others belong to a quantized format."""
        return self.dtype in FLOATS

    @property
    def is_view(self) -> bool:
        """Whether `read_plain` copies nothing."""
        return self.dtype != "F64"

    def rows(self, begin: int, end: int) -> StoredTensor:
        """Return rows [begin, end) of the first axis, in place."""
        row_bytes = self.num_bytes // max(self.shape[0], 1)
        place = {"begin": self.begin + begin * row_bytes, "end": self.begin + end * row_bytes}
        return msgspec.structs.replace(self, shape=(end - begin, *self.shape[1:]), **place)

    def at(self, index: int) -> StoredTensor:
        """Return what the first axis has at `index`, in place."""
        return msgspec.structs.replace(self.rows(index, index + 1), shape=self.shape[1:])

    def read_stored(self) -> np.ndarray:
        """Return the numbers as stored, a view of the mapping; 8-bit and brain floats as unsigned integers."""
        return np.frombuffer(self.data, _DTYPES[self.dtype], math.prod(self.shape), self.begin).reshape(self.shape)

    def read(self) -> np.ndarray:
        """Return the values as float32; a view of the mapping if they are stored so."""
        raw = self.read_stored()
        if self.dtype in _BFLOAT16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        if self.dtype == "F8_E8M0":
            powers = np.ldexp(np.float32(1), np.minimum(raw, 254).astype(np.int32) - 127)
            scales: np.ndarray = np.where(raw == 255, np.float32(np.nan), powers)
            return scales
        return raw.astype(np.float32, copy=False)

    @property
    def as_scales(self) -> StoredTensor:
        """Return these scales of 8-bit floats; bytes without a type are exponents (E8M0)."""
        return msgspec.structs.replace(self, dtype="F8_E8M0") if self.dtype == "U8" else self

    def read_plain(self) -> np.ndarray:
        """Return the values as float32, float16 or the bits of bfloat16; a view of the mapping if they are stored so."""
        return self.read_stored() if self.is_view else self.read()

    def kept(self) -> None:
        """Return None: plain numbers have no quantized format."""

    def read_integers(self, format: WeightFormat) -> QuantizedWeight:
        raise AssertionError(f"{self.name} has dtype {self.dtype} and cannot be converted to {format}")


class SafetensorsFile:
    """Mapped file, with `tensors` by name and the writer's `metadata`."""

    def __init__(self, path: Path, mapped: MappedFile | None = None) -> None:
        """`mapped`: its contents, if they are not to be mapped here."""
        self.path = path
        self.mapped = map_file(path) if mapped is None else mapped
        self.data = self.mapped.data
        try:
            header, data_begin = self._header()
        finally:
            self.mapped.check()
        metadata = header.pop("__metadata__", {})
        found = metadata.items() if isinstance(metadata, dict) else ()
        self.metadata: dict[str, str] = {name: text for name, text in found if isinstance(text, str)}
        self.tensors = {name: self._entry(name, entry, data_begin) for name, entry in header.items()}

    def _header(self) -> tuple[dict[str, Any], int]:
        if len(self.data) < _PREFIX_BYTES:
            raise self._damaged(f"it has {len(self.data)} bytes, too few for a header")
        num_bytes = int.from_bytes(self.data[:_PREFIX_BYTES], "little")
        end = _PREFIX_BYTES + num_bytes
        if num_bytes > _MAX_HEADER_BYTES or end > len(self.data):
            raise self._damaged(f"its header should have {num_bytes} bytes, but the file has {len(self.data)}")
        try:
            header = json.loads(self.data[_PREFIX_BYTES:end])
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._damaged("its header is not a JSON object")
        return header, end

    def _entry(self, name: str, entry: Any, data_begin: int) -> StoredTensor:
        if len(name) > _MAX_NAME_CHARACTERS:
            raise self._damaged(f"a tensor's name, {name[:40]}..., has {len(name)} characters")
        try:
            dtype, shape = entry["dtype"], _integers(entry["shape"])
            begin, end = (data_begin + offset for offset in _integers(entry["data_offsets"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"the header entry of {name} is malformed") from error
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {str(dtype)[:40]}; supported are {', '.join(_DTYPES)}")
        if end > len(self.data):
            raise self._damaged(f"{name} should end at byte {end}, but the file has {len(self.data)} bytes")
        if min(shape, default=1) < 0 or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize or begin < data_begin:
            raise self._damaged(f"{name} has {end - begin} bytes, which does not fit {dtype} {list(shape)}")
        return StoredTensor(self.data, name, dtype, shape, begin, end)

    def _damaged(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged: {text}; download it again")


def _integers(values: Any) -> tuple[int, ...]:
    """Convert sizes or offsets; raises TypeError or ValueError for other values."""
    if len(values) > _MAX_DIMENSIONS or not all(type(each) is int and abs(each) <= _MAX_SIZE for each in values):
        raise ValueError("no sizes")
    return tuple(values)

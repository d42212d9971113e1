"""A GGUF file, mapped read-only: its metadata, and where its tensors are.

Called by `parts.py` in the launcher (metadata) and in the worker's loader (tensors). The format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian:

    "GGUF" | version: u32 | tensors: u64 | entries: u64 | metadata entries | tensor entries | padding | data

The `gguf` package reads an array of strings element by element into objects that take seconds for a large vocabulary; tests use
it to write files, and to check what is read here.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.files import map_file
from engine.errors import CheckpointError

LINK_NAME = "model.gguf"  # name of the file in a converted checkpoint directory
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_ARRAY_DEPTH = 8  # no known writer nests arrays
# bound the memory and time that a damaged file takes; the largest vocabularies have 300,000 tokens
_MAX_METADATA_BYTES, _MAX_ARRAY_LENGTH, _MAX_ENTRIES, _MAX_TENSORS = 1 << 28, 1 << 23, 1 << 16, 1 << 20
_MAX_NAME_BYTES = 1024

# type of a tensor's values: name, values per block, bytes per block
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_OTHER_TYPES = {  # that are not read
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
    **{40: "NVFP4", 41: "Q1_0"},
}


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor's entry; [begin, end) are bytes of the file. Rows (the last dimension) are whole blocks."""

    file: GgufFile
    name: str
    type_name: str
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """A mapped file: `metadata` by key, `tensors` by name. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = map_file(path)
        self.data = self.mapped.data
        self._position = 0
        try:
            num_tensors, num_entries = self._head()
            self.metadata: dict[str, Any] = {}
            if num_entries > _MAX_ENTRIES or num_tensors > _MAX_TENSORS:
                raise self._damaged(f"it should have {num_entries} metadata entries and {num_tensors} tensors")
            for _ in range(num_entries):
                key = self._string()
                if key in self.metadata:
                    raise self._damaged(f"it has the metadata entry {key[:80]} twice")
                self.metadata[key] = self._value(self._scalar("I"))
            entries = [self._tensor_entry() for _ in range(num_tensors)]
            self.tensors = self._placed(entries)
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            self.mapped.check()
            raise self._damaged(str(error)) from error
        except CheckpointError:
            self.mapped.check()
            raise
        self.mapped.check()

    def _head(self) -> tuple[int, int]:
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {bytes(self.data[:4])!r}")
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; supported versions are {', '.join(map(str, _VERSIONS))}"
            )
        num_tensors = self._scalar("Q")
        return num_tensors, self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        num_bytes = self._scalar("Q")
        begin, self._position = self._position, self._position + num_bytes
        if self._position > len(self.data):
            raise self._damaged(f"a string of {num_bytes} bytes at offset {begin} exceeds the file")
        self._check_size()
        return self.data[begin : self._position].decode()

    def _value(self, kind: int, depth: int = 0) -> Any:
        """Read a metadata value. `depth`: number of enclosing arrays."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise self._damaged(f"a metadata value has the unknown type {kind}")
        value = self._scalar(_SCALARS[kind])
        return shortest(value) if kind == _FLOAT32 else value

    def _array(self, depth: int) -> list[Any]:
        if depth == _MAX_ARRAY_DEPTH:
            raise self._damaged(f"metadata arrays are nested deeper than {_MAX_ARRAY_DEPTH}")
        kind, length = self._scalar("I"), self._scalar("Q")
        if length > min(len(self.data), _MAX_ARRAY_LENGTH):
            raise self._damaged(f"a metadata array of {length} values is longer than the file or {_MAX_ARRAY_LENGTH} values")
        if kind not in _SCALARS:
            return [self._value(kind, depth + 1) for _ in range(length)]
        code = f"<{length}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self.data, self._position)
        self._position += struct.calcsize(code)
        self._check_size()
        return list(values)

    def _check_size(self) -> None:
        if self._position > _MAX_METADATA_BYTES:
            raise self._damaged(f"its metadata exceeds {_MAX_METADATA_BYTES >> 20} MiB")

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        if len(name) > _MAX_NAME_BYTES:
            raise self._damaged(f"a tensor's name, {name[:40]}..., has {len(name)} characters")
        num_dimensions = self._scalar("I")
        if not 0 < num_dimensions <= 8:
            raise self._damaged(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        if not all(shape):
            raise self._damaged(f"{name} has the shape {list(shape)}")
        kind = self._scalar("I")
        return name, shape, kind, self._scalar("Q")

    def _placed(self, entries: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        data_begin = -(-self._position // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            if kind not in BLOCKS:
                known = ", ".join(type_name for type_name, _, _ in BLOCKS.values())
                found = _OTHER_TYPES.get(kind, f"number {kind}")
                raise CheckpointError(f"{self.path}: {name} has type {found}, which is not supported; supported: {known}")
            type_name, block_values, block_bytes = BLOCKS[kind]
            if shape and shape[-1] % block_values:
                raise self._damaged(f"{name} has rows of {shape[-1]} values, {type_name} has blocks of {block_values}")
            begin = data_begin + offset
            end = begin + math.prod(shape) // block_values * block_bytes
            if end > len(self.data):
                raise self._damaged(f"{name} should end at byte {end}, but the file has {len(self.data)} bytes")
            if name in tensors:
                raise self._damaged(f"it has the tensor {name} twice")
            tensors[name] = GgufTensor(self, name, type_name, shape, begin, end)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.begin)
        for first, second in itertools.pairwise(ordered):
            if second.begin < first.end:
                raise self._damaged(f"{first.name} and {second.name} overlap at byte {second.begin}")
        return tensors

    def _damaged(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged: {text}; download it again")


def shortest(value: float) -> float:
    """Return the shortest decimal number that is `value` as a float32: 1e-06, not 9.999999974752427e-07."""
    if not math.isfinite(value):
        return value
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def is_gguf(path: Path) -> bool:
    return re.fullmatch(r".+\.gguf", path.name, re.IGNORECASE) is not None and path.is_file()

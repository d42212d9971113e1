"""Named offsets of the shared structs, for the parts that Python accesses itself (headers, tables, inspection).

The only definition is `shm/native/layout.h`, with a byte diagram above every struct; the native module provides its names,
offsets and sizes. `LAYOUT_HASH` covers them all.
"""

from __future__ import annotations

from shm import _native
from shm.errors import SharedMemoryError

LAYOUT_HASH = _native.LAYOUT_HASH
LAYOUT_VERSION = _native.LAYOUT_VERSION
MAGIC = _native.MAGIC
LINE = _native.LINE
MAX_NAME_BYTES = _native.LAYOUT["WriterLine"]["owner"][1] - 1


def size_of(struct: str) -> int:
    """Return sizeof(struct)."""
    return _native.LAYOUT[struct][""][1]


def offset_of(struct: str, field: str) -> int:
    return _native.LAYOUT[struct][field][0]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class StructView:
    """View of a struct in a mapped buffer: words as integers (load-acquire, store-release), text as UTF-8 up to a zero."""

    __slots__ = ("_buffer", "_fields", "offset")

    def __init__(self, struct: str, buffer: memoryview, offset: int = 0) -> None:
        self._fields = _native.LAYOUT[struct]
        self._buffer = buffer
        self.offset = offset

    def word(self, field: str) -> int:
        offset, num_bytes = self._fields[field]
        load = _native.load_u32 if num_bytes == 4 else _native.load_u64
        return load(self._buffer, self.offset + offset)

    def set_word(self, field: str, value: int) -> None:
        offset, num_bytes = self._fields[field]
        store = _native.store_u32 if num_bytes == 4 else _native.store_u64
        store(self._buffer, self.offset + offset, value)

    def text(self, field: str) -> str:
        offset, num_bytes = self._fields[field]
        raw = bytes(self._buffer[self.offset + offset : self.offset + offset + num_bytes])
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    def set_text(self, field: str, text: str) -> None:
        offset, num_bytes = self._fields[field]
        raw = text.encode()
        if len(raw) >= num_bytes:
            raise SharedMemoryError(f"{field} {text!r} has {len(raw)} bytes, the limit is {num_bytes - 1}; use a shorter name")
        self._buffer[self.offset + offset : self.offset + offset + num_bytes] = raw.ljust(num_bytes, b"\0")

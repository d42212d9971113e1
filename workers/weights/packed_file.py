"""A file of packed weights: written piece by piece while modules are packed, mapped read-only, so that everyone who serves the
same weights shares its pages, and checked piece by piece, as far as it is used. It is the same for any number of ranks.

Used by `cache.py`, which knows where such files lie and for how long.

    0       8         12        16           24            32              40
    +-------+---------+---------+------------+-------------+---------------+------------+-----+-----------------------+
    | magic | version | 0: u32  | file bytes | index bytes | its checksum  | index JSON | pad | arrays, at cache lines |
    +-------+---------+---------+------------+-------------+---------------+------------+-----+-----------------------+
    {"description": ..., "checksums": of each piece from the first array on, "arrays": {name: [dtype, shape, offset]}}

Numbers are u64 of this machine but for the version (u32). The first bytes are written last: a file without them is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.files import open_file
from ops import _cpu
from ops.weight_format import ALIGNMENT, Fills, Parts

_MAGIC = b"TKPACKED"
_VERSION = 2
_HEAD = struct.Struct("=8sIIQQQ")
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_READ = 22  # as Linux has it (5.14); Python does not name it
_PIECE = 4 << 20  # that is written, or checked, at a time
_MAX_PARTS = 1024  # of a piece; as many as Linux writes at once (IOV_MAX)
_MAX_WRITES = 8  # pieces that wait to be written


class DamagedFileError(Exception):
    """A file of packed weights that cannot be used; says why."""


class Layout:
    """A store that fills nothing: what is to be kept, and where in a file it comes."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name: dtype, shape, offset from the first array
        self.num_bytes = 0

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        assert name not in self.arrays, f"{name} is kept twice"
        self.arrays[name] = (dtype.str, shape, self.num_bytes)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return np.empty(shape, dtype)  # never touched


class FileWriter:
    """A store that fills the arrays of `layout` in a new file, in the order of the layout; whoever opened `descriptor` closes
    it. Raises OSError where there is no room.

    The file is written in pieces of whole huge pages: a page cache that knows large folios then keeps it in such, and whoever
    maps it has it mapped by huge pages. A thread of its own writes, while what comes next is packed. `close` is to be called
    whatever happens, before the descriptor's."""

    def __init__(self, descriptor: int, layout: Layout, description: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._description = description
        self._begin = -(-(_HEAD.size + len(self._index([0] * -(-layout.num_bytes // _PIECE)))) // _PAGE) * _PAGE
        self.num_bytes = self._begin + layout.num_bytes
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, self.num_bytes)  # an error now, not in the middle
        self._gathered: list[memoryview] = []  # what comes at `_num_given`
        self._num_gathered = self._num_given = 0
        self._writes: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, "packed-weights")
        self._append(np.zeros(self._begin, np.uint8))

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        kept, expected, offset = self._layout.arrays[name]
        assert (kept, expected) == (dtype.str, shape), f"{name} was {kept} {expected} and is {dtype.str} {shape}"
        padding = self._begin + offset - (self._num_given + self._num_gathered)
        assert 0 <= padding < ALIGNMENT, f"{name} comes out of order"
        self._append(np.zeros(padding, np.uint8))
        fills = fill if isinstance(fill, Sequence) else [fill]
        for fill_part in fills:  # each in memory of its own, which lives until it is written
            part = np.empty((shape[0] // len(fills), *shape[1:]), dtype)
            fill_part(part)
            self._append(part.reshape(-1).view(np.uint8))
        return part if len(fills) == 1 else np.empty(shape, dtype)  # never touched

    def finish(self) -> None:
        """Make the file valid."""
        self._append(np.zeros(self.num_bytes - self._num_given - self._num_gathered, np.uint8))
        self._flush()
        while self._writes:
            self._writes.popleft().result()
        self.close()
        self._memory = mmap.mmap(self._descriptor, self.num_bytes, access=mmap.ACCESS_READ)  # keeps the lock as well
        index = self._index([_piece_checksum(self._memory, self._begin, piece) for piece in range(self._num_pieces)])
        os.pwrite(self._descriptor, index, _HEAD.size)
        os.pwrite(self._descriptor, _HEAD.pack(_MAGIC, _VERSION, 0, self.num_bytes, len(index), _checksum(index)), 0)

    def close(self) -> None:
        """End its thread, and with it what is not written yet."""
        self._thread.shutdown(cancel_futures=True)

    def _append(self, values: np.ndarray) -> None:
        while len(values):
            part = values[: _PIECE - (self._num_given + self._num_gathered) % _PIECE]
            self._gathered.append(part.data)
            self._num_gathered += len(part)
            values = values[len(part) :]
            if (self._num_given + self._num_gathered) % _PIECE == 0 or len(self._gathered) == _MAX_PARTS:
                self._flush()

    def _flush(self) -> None:
        if len(self._writes) == _MAX_WRITES:
            self._writes.popleft().result()
        self._writes.append(self._thread.submit(_write, self._descriptor, self._gathered, self._num_given))
        self._num_given += self._num_gathered
        self._gathered, self._num_gathered = [], 0

    @property
    def _num_pieces(self) -> int:
        return -(-self._layout.num_bytes // _PIECE)

    def _index(self, checksums: list[int]) -> bytes:
        shown = [f"{checksum:016x}" for checksum in checksums]
        content = {"description": self._description, "checksums": shown, "arrays": self._layout.arrays}
        return json.dumps(content).encode()


def _write(descriptor: int, parts: list[memoryview], offset: int) -> None:
    while parts:
        num_written = os.pwritev(descriptor, parts, offset)
        offset += num_written
        while parts and num_written >= len(parts[0]):
            num_written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][num_written:]


class PackedFile:
    """A store of a file that is complete: nothing is filled. While arrays of it live the file is locked (shared), which says
    that it is in use. Raises DamagedFileError, and OSError where it cannot be opened."""

    def __init__(self, path: Path, is_checked: bool = True) -> None:
        """`is_checked`: whether what is used is read and compared with its checksums."""
        descriptor = open_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            size = os.fstat(descriptor).st_size
            if size < _HEAD.size:
                raise DamagedFileError(f"it has {size} bytes, too few for its head")
            self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)  # keeps the descriptor, and with it the lock
        finally:
            os.close(descriptor)
        self.num_bytes = size
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # also has them read into such
        index = self._index()
        self.description: dict[str, Any] = index["description"]
        self._arrays: dict[str, list[Any]] = index["arrays"]
        self._unchecked = dict(enumerate(index["checksums"])) if is_checked else {}

    def map_all(self) -> None:
        """Every page now rather than when it is first read."""
        with contextlib.suppress(OSError):  # not known to older kernels: then they come one by one
            self._memory.madvise(_MADV_POPULATE_READ)

    def _index(self) -> dict[str, Any]:
        magic, version, _, size, index_bytes, checksum = _HEAD.unpack_from(self._memory)
        if (magic, version) != (_MAGIC, _VERSION):
            raise DamagedFileError("it does not begin as such a file does")
        if size != self.num_bytes or index_bytes > size - _HEAD.size:
            raise DamagedFileError(f"it has {self.num_bytes} bytes, {size} were written")
        if _checksum(self._memory, _HEAD.size, index_bytes) != checksum:
            raise DamagedFileError("its index does not have the checksum it was written with")
        self._begin = -(-(_HEAD.size + index_bytes) // _PAGE) * _PAGE
        index: dict[str, Any] = json.loads(self._memory[_HEAD.size : _HEAD.size + index_bytes])
        return index

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        kept, expected, offset = self._arrays.get(name, ("", [], 0))
        if (kept, tuple(expected)) != (dtype.str, shape):
            raise DamagedFileError(f"{name} should be {dtype.str} {list(shape)}, it holds {kept} {expected}")
        row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        for begin, end in parts or [(0, shape[0])]:
            self._check(offset + begin * row_bytes, offset + end * row_bytes)
        return _array(self._memory, kept, shape, self._begin + offset)

    def _check(self, begin: int, end: int) -> None:
        """What was not checked before of these bytes from the first array on."""
        for piece in range(begin // _PIECE, -(-end // _PIECE)):
            expected = self._unchecked.pop(piece, None)
            if expected is not None and _piece_checksum(self._memory, self._begin, piece) != int(expected, 16):
                raise DamagedFileError("its contents do not have the checksum they were written with")


def _array(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
    return np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape)


def _piece_checksum(memory: mmap.mmap, begin: int, piece: int) -> int:
    first = begin + piece * _PIECE
    return _checksum(memory, first, min(_PIECE, len(memory) - first))


def _checksum(memory: mmap.mmap | bytes, begin: int = 0, num_bytes: int = -1) -> int:
    values = np.frombuffer(memory, np.uint8, num_bytes, begin)
    return _cpu.checksum(values.ctypes.data, len(values))

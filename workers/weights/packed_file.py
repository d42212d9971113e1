"""File of packed weights: written in pieces while modules are packed, then mapped read-only, so that all processes with the
same weights share its pages. Pieces are checked when they are used. The file is the same for any number of ranks.

Used by `cache.py`, which manages the files.

    0       8         12        16           24            32              40     2 MiB
    +-------+---------+---------+------------+-------------+---------------+-----+------------------------+------------+
    | magic | version | 0: u32  | file bytes | index bytes | its checksum  | gap | arrays, at cache lines | index JSON |
    +-------+---------+---------+------------+-------------+---------------+-----+------------------------+------------+
    {"description": ..., "checksums": of each piece from the first array on, "arrays": {name: [dtype, shape, offset]}}

Numbers are native u64 except for the version (u32). The first bytes are written last; a file without them is invalid. The first
array begins at a piece boundary, like huge pages. The index is behind the arrays, the sizes of which may not be known before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.files import open_file
from ops import _cpu
from ops.cpu.array import empty
from ops.weight_format import ALIGNMENT, Fill, Fills, Parts
from shm.file_guard import FileGuard

_MAGIC = b"TKPACKED"
_VERSION = 4
_HEAD = struct.Struct("=8sIIQQQ")
_MADV_POPULATE_READ = 22  # in Linux since 5.14; Python does not name it
_PIECE = 2 << 20  # written or checked at a time
_PIECES_OF_THREAD = 4  # gathered before they are written


class DamagedFileError(Exception):
    """Unusable file of packed weights, with the reason."""


class Layout:
    """Store that fills nothing: plans the arrays and their offsets in a file."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name: dtype, shape, offset from the first array
        self.num_bytes = 0

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        assert name not in self.arrays, f"{name} is stored twice"
        self.arrays[name] = (dtype.str, shape, self.num_bytes)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return np.empty(shape, dtype)  # never touched


class FileWriter:
    """Store that fills arrays in a new file; the caller closes `descriptor`. Raises OSError if there is no space for those of
    `layout`. `description` may be changed until the end.

    The file is written in pieces of whole huge pages, so that a page cache with large folios uses them, and mappings get huge
    pages. A single thread writes while the next pieces are packed, because writes to one file are serialized anyway. It
    alternates between two buffers, which stay allocated and often cached. Always call `close` before closing the descriptor.
    """

    def __init__(self, descriptor: int, layout: Layout, description: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self.description = description
        self._arrays: dict[str, tuple[str, tuple[int, ...], int]] = {}  # as those of `Layout`
        self._checksums: list[int] = []
        self.num_bytes = 0  # of the finished file
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, _HEAD.size)  # fails now rather than midway
        os.posix_fallocate(descriptor, _PIECE, max(1, layout.num_bytes))
        num_pieces = min(_PIECES_OF_THREAD * _cpu.num_threads() + 1, max(1, -(-layout.num_bytes // _PIECE)))
        self._room, self._other_room = (empty(num_pieces * _PIECE // 4).view(np.uint8) for _ in range(2))
        self._num_gathered = self._num_given = 0  # bytes in the buffer, and written before it, from the first array on
        self._write: Future[None] | None = None  # of the other buffer
        self._thread = ThreadPoolExecutor(1, "packed-weights")

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        assert name not in self._arrays, f"{name} is stored twice"
        self._align()
        self._arrays[name] = (dtype.str, shape, self._num_given + self._num_gathered)
        for num_rows, fill_rows in fill if isinstance(fill, Sequence) else [(shape[0], fill)]:
            self._fill((num_rows, *shape[1:]), dtype, fill_rows)
        return np.empty(shape, dtype)  # never touched

    def finish(self) -> None:
        """Make the file valid."""
        self._align()
        self._give(self._num_gathered)
        self._wait()
        self.close()
        index, end = self._index(), _PIECE + self._num_given
        self.num_bytes = end + len(index)
        _write(self._descriptor, np.frombuffer(index, np.uint8), end)
        os.ftruncate(self._descriptor, self.num_bytes)  # there may be less than was planned
        self._memory = mmap.mmap(self._descriptor, self.num_bytes, access=mmap.ACCESS_READ)  # keeps the lock
        os.pwrite(self._descriptor, _HEAD.pack(_MAGIC, _VERSION, 0, self.num_bytes, len(index), _checksum(index)), 0)

    def close(self) -> None:
        """End the writer thread."""
        self._thread.shutdown()

    def _fill(self, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> None:
        """Fill an array in the buffer, or in separate memory if it is larger than the buffer."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._room) - _PIECE + 1:
            values = np.empty(shape, dtype)
            fill(values)
            self._append(values.reshape(-1).view(np.uint8))
            return
        if num_bytes > len(self._room) - self._num_gathered:
            self._give_pieces()
        end = self._num_gathered + num_bytes
        fill(self._room[self._num_gathered : end].view(dtype).reshape(shape))
        self._num_gathered = end

    def _align(self) -> None:
        self._append(np.zeros(-(self._num_given + self._num_gathered) % ALIGNMENT, np.uint8))

    def _append(self, values: np.ndarray) -> None:
        while len(values):
            if self._num_gathered == len(self._room):
                self._give_pieces()
            count = min(len(values), len(self._room) - self._num_gathered)
            self._room[self._num_gathered : self._num_gathered + count] = values[:count]
            self._num_gathered += count
            values = values[count:]

    def _give_pieces(self) -> None:
        """Write the complete pieces."""
        self._give(self._num_gathered // _PIECE * _PIECE)

    def _give(self, num_bytes: int) -> None:
        """Write the first bytes of the buffer and move the rest to the other one."""
        sums = np.zeros(-(-num_bytes // _PIECE), np.uint64)
        _cpu.checksums(sums.ctypes.data, self._room.ctypes.data, num_bytes, _PIECE)
        self._checksums += sums.tolist()
        self._wait()
        given, rest = self._room[:num_bytes], self._room[num_bytes : self._num_gathered]
        self._write = self._thread.submit(_write, self._descriptor, given, _PIECE + self._num_given)
        self._room, self._other_room = self._other_room, self._room
        self._room[: len(rest)] = rest
        self._num_gathered = len(rest)
        self._num_given += num_bytes

    def _wait(self) -> None:
        if self._write is not None:
            self._write.result()

    def _index(self) -> bytes:
        shown = [f"{checksum:016x}" for checksum in self._checksums]
        content = {"description": self.description, "checksums": shown, "arrays": self._arrays}
        return json.dumps(content).encode()


def _write(descriptor: int, values: np.ndarray, offset: int) -> None:
    for begin in range(0, len(values), _PIECE):
        piece = values[begin : begin + _PIECE].data
        while piece:
            num_written = os.pwrite(descriptor, piece, offset)
            offset += num_written
            piece = piece[num_written:]


class PackedFile:
    """Store of a complete file: fills nothing. While arrays of it live, the file has a shared lock, which marks it as used.
    Raises DamagedFileError, and OSError if it cannot be opened. `trouble` reports whether the mapped data is still valid."""

    def __init__(self, path: Path, is_checked: bool = True) -> None:
        """`is_checked`: compare the used pieces with their checksums."""
        descriptor = open_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with contextlib.suppress(PermissionError):  # another user's file
                fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NOATIME)  # reading is not a use; `cache.py` marks those
            status = os.fstat(descriptor)
            size = status.st_size
            if size < _HEAD.size:
                raise DamagedFileError(f"it has {size} bytes, too few for its header")
            self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)  # keeps the descriptor and its lock
            self._guard = FileGuard(self._memory)
            self._path, self._status = path, status
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._descriptor = descriptor
        self.num_bytes = size
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # also reads into huge pages
        index = self._index()
        self.description: dict[str, Any] = index["description"]
        self._arrays: dict[str, list[Any]] = index["arrays"]
        self._checksums: list[str] = index["checksums"]
        self._used: set[int] = set()  # pieces
        self._is_checked = is_checked

    def trouble(self) -> str:
        """Return why the arrays may have changed since they were written, or an empty string."""
        now = os.fstat(self._descriptor)
        if now.st_size < self._status.st_size:
            return f"{self._path} was truncated while it was in use"
        if now.st_mtime_ns != self._status.st_mtime_ns:
            if not all(map(self._is_intact, self._used)):
                return f"{self._path} was written to while it was in use"
            self._status = now  # only touched, or written outside the used pieces
        return f"{self._path} cannot be read: disk error" if self._guard.is_lost else ""

    def map_all(self) -> None:
        """Map every page now rather than at first use."""
        with contextlib.suppress(OSError):  # older kernels lack it: pages are mapped one by one
            self._memory.madvise(_MADV_POPULATE_READ)

    def _index(self) -> dict[str, Any]:
        magic, version, _, size, index_bytes, checksum = _HEAD.unpack_from(self._memory)
        if (magic, version) != (_MAGIC, _VERSION):
            raise DamagedFileError("it has no valid signature")
        if size != self.num_bytes or index_bytes > size - _PIECE:
            raise DamagedFileError(f"it has {self.num_bytes} bytes, expected {size}")
        self._end = size - index_bytes
        if _checksum(self._memory, self._end, index_bytes) != checksum:
            raise DamagedFileError("checksum mismatch in its index")
        index: dict[str, Any] = json.loads(self._memory[self._end :])
        return index

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        kept, expected, offset = self._arrays.get(name, ("", [], 0))
        if (kept, tuple(expected)) != (dtype.str, shape):
            raise DamagedFileError(f"{name} should be {dtype.str} {list(shape)}, but is {kept} {expected}")
        row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        for begin, end in parts or [(0, shape[0])]:
            self._check(offset + begin * row_bytes, offset + end * row_bytes)
        return _array(self._memory, kept, shape, _PIECE + offset)

    def _check(self, begin: int, end: int) -> None:
        """Check the bytes, counted from the first array, that were not checked before."""
        for piece in range(begin // _PIECE, -(-end // _PIECE)):
            if piece not in self._used and self._is_checked and not self._is_intact(piece):
                raise DamagedFileError("checksum mismatch in its contents")
            self._used.add(piece)

    def _is_intact(self, piece: int) -> bool:
        first = (1 + piece) * _PIECE
        return _checksum(self._memory, first, min(_PIECE, self._end - first)) == int(self._checksums[piece], 16)


def _array(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
    return np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape)


def _checksum(memory: mmap.mmap | bytes, begin: int = 0, num_bytes: int = -1) -> int:
    values = np.frombuffer(memory, np.uint8, num_bytes, begin)
    return _cpu.checksum(values.ctypes.data, len(values))

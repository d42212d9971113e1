"""A file of packed weights: written piece by piece while modules are packed, mapped read-only, so that everyone who serves the
same weights shares its pages, and checked piece by piece, as far as it is used. It is the same for any number of ranks.

Used by `cache.py`, which knows where such files lie and for how long.

    0       8         12        16           24            32              40
    +-------+---------+---------+------------+-------------+---------------+------------+-----+-----------------------+
    | magic | version | 0: u32  | file bytes | index bytes | its checksum  | index JSON | gap | arrays, at cache lines |
    +-------+---------+---------+------------+-------------+---------------+------------+-----+-----------------------+
    {"description": ..., "checksums": of each piece from the first array on, "arrays": {name: [dtype, shape, offset]}}

Numbers are u64 of this machine but for the version (u32). The first bytes are written last: a file without them is none. The
first array begins a piece, as huge pages do; nothing lies in the gap before it.
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
_VERSION = 3
_HEAD = struct.Struct("=8sIIQQQ")
_MADV_POPULATE_READ = 22  # as Linux has it (5.14); Python does not name it
_PIECE = 2 << 20  # that is written, or checked, at a time
_PIECES_OF_THREAD = 4  # that are gathered before they are written


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
    maps it has it mapped by huge pages. A thread of its own writes, while what comes next is packed: one, for writes to a file
    wait for each other. What it writes lies in two rooms in turn, whose memory is there and maybe still in a cache. `close` is
    to be called whatever happens, before the descriptor's."""

    def __init__(self, descriptor: int, layout: Layout, description: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._description = description
        self._checksums = np.zeros(-(-layout.num_bytes // _PIECE), np.uint64)
        self._begin = _first_piece(len(self._index()))
        self.num_bytes = self._begin + layout.num_bytes
        os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, _HEAD.size + len(self._index()))  # an error now, not in the middle
        os.posix_fallocate(descriptor, self._begin, layout.num_bytes)
        num_pieces = min(_PIECES_OF_THREAD * _cpu.num_threads() + 1, len(self._checksums))
        self._room, self._other_room = (empty(num_pieces * _PIECE // 4).view(np.uint8) for _ in range(2))
        self._num_gathered = self._num_given = 0  # bytes in the room, and of those before, from the first array on
        self._write: Future[None] | None = None  # of what is in the other room
        self._thread = ThreadPoolExecutor(1, "packed-weights")

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        kept, expected, offset = self._layout.arrays[name]
        assert (kept, expected) == (dtype.str, shape), f"{name} was {kept} {expected} and is {dtype.str} {shape}"
        padding = offset - (self._num_given + self._num_gathered)
        assert 0 <= padding < ALIGNMENT, f"{name} comes out of order"
        self._append(np.zeros(padding, np.uint8))
        for num_rows, fill_rows in fill if isinstance(fill, Sequence) else [(shape[0], fill)]:
            self._fill((num_rows, *shape[1:]), dtype, fill_rows)
        return np.empty(shape, dtype)  # never touched

    def finish(self) -> None:
        """Make the file valid."""
        self._append(np.zeros(self._layout.num_bytes - self._num_given - self._num_gathered, np.uint8))
        self._give(self._num_gathered)
        self._wait()
        self.close()
        self._memory = mmap.mmap(self._descriptor, self.num_bytes, access=mmap.ACCESS_READ)  # keeps the lock
        index = self._index()
        os.pwrite(self._descriptor, index, _HEAD.size)
        os.pwrite(self._descriptor, _HEAD.pack(_MAGIC, _VERSION, 0, self.num_bytes, len(index), _checksum(index)), 0)

    def close(self) -> None:
        """End its thread."""
        self._thread.shutdown()

    def _fill(self, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> None:
        """Where it goes, or in memory of its own where there is never as much room."""
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

    def _append(self, values: np.ndarray) -> None:
        while len(values):
            if self._num_gathered == len(self._room):
                self._give_pieces()
            count = min(len(values), len(self._room) - self._num_gathered)
            self._room[self._num_gathered : self._num_gathered + count] = values[:count]
            self._num_gathered += count
            values = values[count:]

    def _give_pieces(self) -> None:
        """Those that are whole."""
        self._give(self._num_gathered // _PIECE * _PIECE)

    def _give(self, num_bytes: int) -> None:
        """Have the first bytes of the room written; what remains of them comes to the other."""
        sums = self._checksums[self._num_given // _PIECE :]
        _cpu.checksums(sums.ctypes.data, self._room.ctypes.data, num_bytes, _PIECE)
        self._wait()
        given, rest = self._room[:num_bytes], self._room[num_bytes : self._num_gathered]
        self._write = self._thread.submit(_write, self._descriptor, given, self._begin + self._num_given)
        self._room, self._other_room = self._other_room, self._room
        self._room[: len(rest)] = rest
        self._num_gathered = len(rest)
        self._num_given += num_bytes

    def _wait(self) -> None:
        if self._write is not None:
            self._write.result()

    def _index(self) -> bytes:
        shown = [f"{checksum:016x}" for checksum in self._checksums.tolist()]
        content = {"description": self._description, "checksums": shown, "arrays": self._layout.arrays}
        return json.dumps(content).encode()


def _write(descriptor: int, values: np.ndarray, offset: int) -> None:
    for begin in range(0, len(values), _PIECE):
        piece = values[begin : begin + _PIECE].data
        while piece:
            num_written = os.pwrite(descriptor, piece, offset)
            offset += num_written
            piece = piece[num_written:]


def _first_piece(index_bytes: int) -> int:
    return -(-(_HEAD.size + index_bytes) // _PIECE) * _PIECE


class PackedFile:
    """A store of a file that is complete: nothing is filled. While arrays of it live the file is locked (shared), which says
    that it is in use. Raises DamagedFileError, and OSError where it cannot be opened. `trouble` says whether what is mapped is
    still what was written."""

    def __init__(self, path: Path, is_checked: bool = True) -> None:
        """`is_checked`: whether what is used is read and compared with its checksums."""
        descriptor = open_file(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with contextlib.suppress(PermissionError):  # another user's file
                fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NOATIME)  # reading is no use; `cache.py` marks those
            status = os.fstat(descriptor)
            size = status.st_size
            if size < _HEAD.size:
                raise DamagedFileError(f"it has {size} bytes, too few for its header")
            self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)  # keeps the descriptor, and with it the lock
            self._guard = FileGuard(self._memory)
            self._path, self._status = path, status
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._descriptor = descriptor
        self.num_bytes = size
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # also has them read into such
        index = self._index()
        self.description: dict[str, Any] = index["description"]
        self._arrays: dict[str, list[Any]] = index["arrays"]
        self._checksums: list[str] = index["checksums"]
        self._used: set[int] = set()  # pieces
        self._is_checked = is_checked

    def trouble(self) -> str:
        """Why the arrays may not hold what was written any more; nothing where they do."""
        now = os.fstat(self._descriptor)
        if now.st_size < self._status.st_size:
            return f"{self._path} was truncated while it was in use"
        if now.st_mtime_ns != self._status.st_mtime_ns:
            if not all(map(self._is_intact, self._used)):
                return f"{self._path} was written to while it was in use"
            self._status = now  # touched, or written to where nothing is used
        return f"{self._path} cannot be read: disk error" if self._guard.is_lost else ""

    def map_all(self) -> None:
        """Every page now rather than when it is first read."""
        with contextlib.suppress(OSError):  # not known to older kernels: then they come one by one
            self._memory.madvise(_MADV_POPULATE_READ)

    def _index(self) -> dict[str, Any]:
        magic, version, _, size, index_bytes, checksum = _HEAD.unpack_from(self._memory)
        if (magic, version) != (_MAGIC, _VERSION):
            raise DamagedFileError("it has no valid signature")
        if size != self.num_bytes or index_bytes > size - _HEAD.size:
            raise DamagedFileError(f"it has {self.num_bytes} bytes, expected {size}")
        if _checksum(self._memory, _HEAD.size, index_bytes) != checksum:
            raise DamagedFileError("checksum mismatch in its index")
        self._begin = _first_piece(index_bytes)
        index: dict[str, Any] = json.loads(self._memory[_HEAD.size : _HEAD.size + index_bytes])
        return index

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        kept, expected, offset = self._arrays.get(name, ("", [], 0))
        if (kept, tuple(expected)) != (dtype.str, shape):
            raise DamagedFileError(f"{name} should be {dtype.str} {list(shape)}, but is {kept} {expected}")
        row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        for begin, end in parts or [(0, shape[0])]:
            self._check(offset + begin * row_bytes, offset + end * row_bytes)
        return _array(self._memory, kept, shape, self._begin + offset)

    def _check(self, begin: int, end: int) -> None:
        """Check the bytes from the first array on that were not checked before."""
        for piece in range(begin // _PIECE, -(-end // _PIECE)):
            if piece not in self._used and self._is_checked and not self._is_intact(piece):
                raise DamagedFileError("checksum mismatch in its contents")
            self._used.add(piece)

    def _is_intact(self, piece: int) -> bool:
        return _piece_checksum(self._memory, self._begin, piece) == int(self._checksums[piece], 16)


def _array(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
    return np.frombuffer(memory, dtype, int(np.prod(shape)), offset).reshape(shape)


def _piece_checksum(memory: mmap.mmap, begin: int, piece: int) -> int:
    first = begin + piece * _PIECE
    return _checksum(memory, first, min(_PIECE, len(memory) - first))


def _checksum(memory: mmap.mmap | bytes, begin: int = 0, num_bytes: int = -1) -> int:
    values = np.frombuffer(memory, np.uint8, num_bytes, begin)
    return _cpu.checksum(values.ctypes.data, len(values))

"""Checksums of a checkpoint's files, remembered so that only the first start reads every byte.

Used by the loader, which finds packed weights by the contents of files, never by names or times. A checksum is remembered under
values that change with every write to a file: device, inode, size, and the change times of its contents and of its inode; the
latter cannot be set back. A file that changed less than two seconds ago is not remembered, because some file systems have
clocks too coarse to show a second change.

All are stored in one small file beside the packed weights, which is replaced as a whole. If two workers write at once, one
result is lost and a later start reads that checkpoint again. A failure to store them is no error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.checkpoint.files import MappedFile, read_file, replace_file
from ops import _cpu

_LOG = logging.getLogger(__name__)
_MAX_REMEMBERED = 1024  # about 100 KiB
_SETTLED_NS = 2_000_000_000
_PIECE = 256 << 20  # bytes between two progress calls


class Checksums:
    """Checksums stored in `directory`, or none without one."""

    def __init__(self, directory: Path | None, settled_ns: int = _SETTLED_NS) -> None:
        self.path = directory / "checksums.json" if directory else None
        self._settled_ns = settled_ns

    def of(self, files: Sequence[MappedFile], on_piece: Callable[[], None]) -> list[str]:
        """Return the checksum of each file; `on_piece` is called regularly while they are read."""
        known = self._remembered()
        begin_ns = time.time_ns()
        found = {file: known.get(_key(file)) or _checksum(file, on_piece) for file in files}
        settled = {
            _key(file): checksum
            for file, checksum in found.items()
            if begin_ns - max(file.status.st_mtime_ns, file.status.st_ctime_ns) >= self._settled_ns
        }
        if not settled.items() <= known.items():
            self._remember({**{key: checksum for key, checksum in known.items() if key not in settled}, **settled})
        return list(found.values())

    def _remembered(self) -> dict[str, str]:
        """Return checksums by key, latest last; empty if the file is missing or damaged."""
        if self.path is None:
            return {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_file(self.path))
            if isinstance(found, dict) and all(isinstance(checksum, str) for checksum in found.values()):
                return found
        return {}

    def _remember(self, checksums: dict[str, str]) -> None:
        if self.path is None:
            return
        latest = dict(list(checksums.items())[-_MAX_REMEMBERED:])
        try:
            replace_file(self.path, json.dumps(latest).encode())
        except OSError as error:  # the next start reads the checkpoint again
            _LOG.info("checksums of the checkpoint cannot be stored: %s", error)


def _key(file: MappedFile) -> str:
    status = file.status
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _checksum(file: MappedFile, on_piece: Callable[[], None]) -> str:
    values = np.frombuffer(file.data, np.uint8)
    pieces = []
    for begin in range(0, len(values), _PIECE):
        piece = values[begin : begin + _PIECE]
        pieces.append(_cpu.checksum(piece.ctypes.data, len(piece)))
        on_piece()
        file.check()
    sums = np.array(pieces, np.uint64)
    return f"{_cpu.checksum(sums.ctypes.data, sums.nbytes):016x}"

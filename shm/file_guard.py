"""Guard of a mapped file: parts that another process cut off, or that the disk cannot read, read as zeros instead of ending
this process with SIGBUS. Readers check `is_lost` before they trust their data.

Used by the readers of checkpoints (`engine/checkpoint/files.py`) and of packed weights (`workers/weights/packed_file.py`).
"""

from __future__ import annotations

import mmap
import weakref

from shm import _native


class FileGuard:
    """Guard of `mapping`, for its lifetime."""

    __slots__ = ("_number",)

    def __init__(self, mapping: mmap.mmap) -> None:
        self._number = _native.guard_file(mapping)
        weakref.finalize(mapping, _native.release_file, self._number).atexit = False

    @property
    def is_lost(self) -> bool:
        """Whether a part of the file could not be read; from then on the rest of the mapping may read as zeros."""
        return _native.is_file_lost(self._number)

"""Directory of packed weights: one file per checkpoint contents, precision and kernel layout, for any number of ranks.

Used by the loader. Files are written under a temporary name and renamed when complete. Every writer and every user holds a lock
(flock) on its file, which ends with the process. A file without a lock is therefore unused: a partial one of a dead writer is
removed, and a complete one may be removed to keep the directory within its limit, least recently used first. If two engines
want to write the same file, one writes and the other packs into memory. The ranks of one engine wait for the writer; if it
dies, one of them writes instead. A failure to store weights is no error: the loader packs into memory.

There is no fsync: the checksum detects a file that a power failure truncated.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

from engine.checkpoint.files import make_directory, open_file
from shm.sizes import size_text
from workers.weights.packed_file import DamagedFileError, FileWriter, Layout, PackedFile

_LOG = logging.getLogger(__name__)
_COMPLETE, _PARTIAL = ".weights", ".partial"
_SLICE_S = 0.1


class WeightCache:
    """`limit`: bytes of all files. `is_shared`: used by several ranks, which wait for the writer. `is_run`: in the directory of
    a run, which keeps only weights in use."""

    def __init__(self, directory: Path, limit: int, is_shared: bool = False, is_run: bool = False) -> None:
        self.directory = directory
        self.limit = limit
        self.is_shared = is_shared
        self.is_run = is_run

    def open(self, name: str) -> PackedFile | None:
        """Return the file of that name, or None if there is none. Raises DamagedFileError if it is unusable."""
        path = self._path(name)
        try:
            file = PackedFile(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("packed weights %s cannot be read: %s", path, error)
            return None
        _mark_used(path)
        return file

    @contextlib.contextmanager
    def writer(
        self, name: str, layout: Layout, description: dict[str, Any], on_slice: Callable[[], None] = lambda: None
    ) -> Iterator[FileWriter | None]:
        """Yield a new file to fill, complete when the block ends and removed if the block raises. Yield None if it cannot be
        stored, for the logged reason, or if another rank wrote it. `on_slice` is called regularly while waiting for that
        rank."""
        try:
            descriptor = self._lock(self._path(name, _PARTIAL), on_slice)
        except OSError as error:
            _LOG.warning("packed weights cannot be stored in %s: %s", self.directory, error)
            descriptor = None
        if descriptor is None:
            yield None
            return
        writer = None
        try:
            writer = self._begin(descriptor, layout, description)
            yield writer
            if writer is not None:
                writer.finish()
                self._rename(name)
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # arrays of the filled file still hold it
        finally:
            if writer is not None:
                writer.close()
            if _is_at(descriptor, self._path(name, _PARTIAL)):
                self._path(name, _PARTIAL).unlink()
            os.close(descriptor)

    def written(self, name: str) -> PackedFile | None:
        """Return the file that was just written, or None if it was removed again."""
        try:
            return PackedFile(self._path(name), is_checked=False)
        except (OSError, DamagedFileError) as error:
            _LOG.warning("packed weights %s cannot be mapped: %s", self._path(name), error)
            return None

    def _path(self, name: str, suffix: str = _COMPLETE) -> Path:
        return self.directory / f"{name}{suffix}"

    def _lock(self, path: Path, on_slice: Callable[[], None]) -> int | None:
        """Return a descriptor that holds the lock of `path`, which is created if missing; None if another process has the lock,
        or wrote the file while this rank waited."""
        make_directory(self.directory)
        descriptor = _open_partial(path)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not self.is_shared:
                    _LOG.info("another worker is writing %s: these weights are packed into memory", path)
                    os.close(descriptor)
                    return None
                _LOG.info("another rank is packing the weights into %s", path)
                _wait_until_unlocked(descriptor, on_slice)
                if not _is_at(descriptor, path):
                    os.close(descriptor)
                    return None
                continue  # the writer died: one of the waiting ranks takes over
            except OSError:
                os.close(descriptor)
                raise
            if _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # removed between the two calls
            descriptor = _open_partial(path)

    def _rename(self, name: str) -> None:
        try:
            self._path(name, _PARTIAL).rename(self._path(name))
            _mark_used(self._path(name))
        except OSError as error:
            _LOG.warning("packed weights cannot be stored in %s: %s", self.directory, error)

    def _begin(self, descriptor: int, layout: Layout, description: dict[str, Any]) -> FileWriter | None:
        try:
            self._remove_leftovers()
            room = self._make_room(layout.num_bytes)
            if room < layout.num_bytes:
                _LOG.warning(
                    "packed weights of %s cannot be stored in %s: its limit of %s (--weight-cache-limit) leaves %s",
                    *(size_text(layout.num_bytes), self.directory, size_text(self.limit), size_text(max(room, 0))),
                )
                return None
            return FileWriter(descriptor, layout, description)
        except OSError as error:
            _LOG.warning("packed weights cannot be stored in %s: %s", self.directory, error)
            return None

    # ------------------------------------------------------------------------------------------------------ removing

    def remove(self, name: str) -> bool:
        """Remove the file of that name unless it is in use; return whether it is gone."""
        return _remove_unused(self._path(name))

    def _remove_leftovers(self) -> None:
        for path in self.directory.glob(f"*{_PARTIAL}"):
            _remove_unused(path)

    def _make_room(self, num_bytes: int) -> int:
        """Remove the least recently used files until `num_bytes` are free; return the free bytes."""
        files = sorted(self._files(), key=lambda file: file[0])
        room = self.limit - sum(size for _, size, _ in files)
        for _, size, path in files:
            if room >= num_bytes and not self.is_run:
                break
            if path.suffix == _COMPLETE and _remove_unused(path):
                room += size
        return room

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of the last use, bytes and path of every file."""
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix in (_COMPLETE, _PARTIAL):
                    yield status.st_atime_ns, status.st_size, path


def _mark_used(path: Path) -> None:
    """Set the last access time, from a clock precise enough to order two uses. The modification time tells users of the mapping
    whether the file was written to."""
    with contextlib.suppress(OSError):  # another user's file, or a read-only directory
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _open_partial(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _wait_until_unlocked(descriptor: int, on_slice: Callable[[], None]) -> None:
    """Wait until the writer has finished or died; the shared lock is then held."""
    waiting = Thread(target=fcntl.flock, args=(descriptor, fcntl.LOCK_SH), daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(_SLICE_S)
        on_slice()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove a file that no process has locked; return whether it is gone."""
    try:
        descriptor = open_file(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            path.unlink()
        return True
    except OSError:
        return False  # in use
    finally:
        os.close(descriptor)

"""Files of checkpoints and files derived from them: opening, reading, mapping and replacing them, and the user's cache
directory.

Used by the readers of formats in every process, and by the launcher. Anything but a regular file is an error at once: opening a
FIFO would block, and reading a device may never end.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path, PurePath

import msgspec

from engine.errors import CheckpointError
from shm.file_guard import FileGuard

PARTIAL = ".partial"  # suffix of unfinished files


def leads_outside(name: str) -> bool:
    """Return whether a relative name, joined to a directory, may lead out of it."""
    place = PurePath(name)
    return place.is_absolute() or ".." in place.parts


class MappedFile(msgspec.Struct, frozen=True, eq=False):
    """A whole file, mapped read-only, and its state in the file system when it was mapped."""

    path: Path
    data: mmap.mmap
    status: os.stat_result
    guard: FileGuard | None = None  # None: the data is our own memory

    @property
    def is_unchanged(self) -> bool:
        """Return whether the same file is still in place and unmodified since it was mapped."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return os.path.samestat(now, self.status) and (now.st_size, now.st_mtime_ns) == (
            self.status.st_size,
            self.status.st_mtime_ns,
        )

    def check(self) -> None:
        """Raise CheckpointError if part of the file could not be read: the missing part was read as zeros."""
        if self.guard is not None and self.guard.is_lost:
            raise CheckpointError(
                f"{self.path} cannot be read completely: it was truncated while being read, or the disk failed or is full; "
                "try again when the file is complete"
            )


def make_directory(path: Path) -> None:
    """Create the directory and its missing parents with mode 0700. Raises OSError."""
    for directory in (*reversed(path.parents), path):
        directory.mkdir(0o700, exist_ok=True)


def open_file(path: Path) -> int:
    """Open a file for reading and return its descriptor. Raises OSError if it is missing or not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises OSError like `open_file`."""
    with open(open_file(path), "rb") as stream:
        return stream.read()


def map_file(path: Path) -> MappedFile:
    """Map the whole file. Raises CheckpointError for a missing, unreadable or empty file."""
    try:
        with open(open_file(path), "rb") as stream:
            status = os.fstat(stream.fileno())
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            return MappedFile(path, data, status, FileGuard(data))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically, readable only by this user. The directory is created if missing and may be shared: the
    temporary file is new, has an unpredictable name and follows no link. Raises OSError."""
    make_directory(path.parent)
    unfinished = path.with_suffix(f".{os.urandom(8).hex()}{PARTIAL}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, in as many pieces as needed. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def user_cache() -> Path:
    """Return Tokamak's directory in the user's cache directory ($XDG_CACHE_HOME, by the XDG base directory specification). It
    may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokamak"

"""Files of clients, as files of the run: every api process can read all of them, and they are removed with the run.

    file-<owner><random>        its content
    file-<owner><random>.json   its description, written last: without it the file does not exist

An owner is a digest of a source (`source_of` in `api/access.py`). Sizes and numbers are limited per owner and in total; files
that do not fit are rejected, and nothing is removed to make room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from api.access import owner_of
from engine.checkpoint.files import PARTIAL, replace_file, write_all
from engine.errors import RequestError

MAX_FILES_PER_USER = 1000
MAX_FILES = 4000
_SWEEP_INTERVAL_NS = 10_000_000_000
_GROWTH_BYTES = 1 << 20  # of an upload, between two checks of the limits
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_NAME = re.compile(r"\.?(?:file-|batch_)(?P<owner>[0-9a-f]{8})[0-9a-f]{24}(?P<rest>.*)")

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals", "batch_output"]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileStore:
    def __init__(self, directory: Path, max_bytes: int, max_bytes_per_user: int) -> None:
        self.directory = directory
        # returns the open batch that reads a file; set by batches
        self.reader_of: Callable[[str], str | None] = lambda file_id: None
        self._max_bytes = max_bytes
        self._max_bytes_per_user = max_bytes_per_user
        self._sweep_due_ns = 0

    def new_id(self, prefix: Literal["file-", "batch_"], source: str) -> str:
        return f"{prefix}{self.owner_of(source)}{secrets.token_hex(12)}"

    def owner_of(self, source: str) -> str:
        return owner_of(self.directory, source)

    def owner_of_id(self, file_id: str) -> str:
        match = _NAME.fullmatch(file_id)
        assert match is not None, file_id
        return match["owner"]

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content. `file_id`: one of ours."""
        assert _ID.fullmatch(file_id), file_id
        return self.directory / file_id

    def is_id(self, text: str, prefix: str) -> bool:
        """Return whether it may be the id of one of our files or batches."""
        return text.startswith(prefix) and _ID.fullmatch(text) is not None

    def find(self, file_id: str) -> FileObject | None:
        """Return a file; None: there is none, or it has expired."""
        if not self.is_id(file_id, "file-"):
            return None
        try:
            found = msgspec.json.decode((self.directory / f"{file_id}.json").read_bytes(), type=FileObject)
        except (OSError, msgspec.DecodeError):
            return None
        if found.expires_at is not None and found.expires_at <= time.time():
            self.delete(file_id)
            return None
        return found

    def ids(self, prefix: str, source: str = "") -> list[str]:
        """Return the ids of all files or batches, or of those of one source."""
        begin = f"{prefix}{self.owner_of(source)}" if source else prefix
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        ids = [name.removesuffix(".json") for name in names if name.endswith(".json") and name.startswith(begin)]
        return [each for each in ids if _ID.fullmatch(each)]

    def delete(self, file_id: str) -> bool:
        """Delete a file; return whether there was one."""
        assert _ID.fullmatch(file_id), file_id
        is_there = False
        with contextlib.suppress(OSError):
            (self.directory / f"{file_id}.json").unlink()
            is_there = True
        with contextlib.suppress(OSError):
            (self.directory / file_id).unlink()
        return is_there

    def write(self, name: str, data: bytes) -> None:
        """Store a small document atomically. Raises OSError."""
        replace_file(self.directory / name, data)

    def add(self, file: FileObject) -> None:
        """Make a file visible that has its content. Raises OSError."""
        self.write(f"{file.id}.json", msgspec.json.encode(file))

    def check_room(self, owner: str, num_more_bytes: int = 0) -> None:
        """Raise RequestError (413) if there is no room for this many more bytes, even without expired files."""
        try:
            self._check_room(owner, num_more_bytes)
        except RequestError:
            if not self._sweep():
                raise
            self._check_room(owner, num_more_bytes)

    def _sweep(self) -> bool:
        """Remove expired files, and uploads of processes that have died. Return whether it was time for that."""
        now_ns = time.monotonic_ns()
        if now_ns < self._sweep_due_ns:
            return False
        self._sweep_due_ns = now_ns + _SWEEP_INTERVAL_NS
        for file_id in self.ids("file-"):
            self.find(file_id)
        for name, _ in list(self._sizes()):
            if name.startswith(".file-") or name.endswith(PARTIAL):
                _remove_abandoned(self.directory / name)
        return True

    def _check_room(self, owner: str, num_more_bytes: int) -> None:
        sizes, numbers = Counter[str](), Counter[str]()
        for name, size in self._sizes():
            if match := _NAME.fullmatch(name):
                sizes[match["owner"]] += size
                numbers[match["owner"]] += not match["rest"]
        for num_bytes, limit, owners, option in (
            (sizes[owner], self._max_bytes_per_user, "your", "--max-files-size-per-user"),
            (sizes.total(), self._max_bytes, "all users'", "--max-files-size"),
        ):
            if num_bytes + num_more_bytes > limit:
                raise RequestError(
                    (
                        f"file storage is full: {owners} files would take {_mebibytes(num_bytes + num_more_bytes)} MiB, limit "
                        f"{_mebibytes(limit)} MiB; delete some, or start the server with a higher {option}"
                    ),
                    status=413,
                    code="file_storage_full",
                    param="file",
                )
        if numbers[owner] > MAX_FILES_PER_USER or numbers.total() > MAX_FILES:
            raise RequestError(
                (
                    f"too many files: {numbers[owner]} of yours and {numbers.total()} in all, limits {MAX_FILES_PER_USER} "
                    f"and {MAX_FILES}; delete some"
                ),
                status=413,
                code="file_storage_full",
                param="file",
            )

    def _sizes(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                with contextlib.suppress(OSError):  # already removed
                    yield entry.name, entry.stat().st_size


class Upload:
    """A file that is being written. It exists once `finish` was called; otherwise call `drop`."""

    def __init__(self, store: FileStore, source: str) -> None:
        """Raise RequestError if there is no room."""
        self.id = store.new_id("file-", source)
        self.num_bytes = 0
        self._store = store
        self._owner = store.owner_of(source)
        self._path = store.directory / f".{self.id}"
        self._num_seen = 0
        store.check_room(self._owner)
        try:
            store.directory.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # until it is closed, also by the death of this process
        except OSError as error:
            raise no_room(error) from error

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes - self._num_seen > _GROWTH_BYTES:
            self._num_seen = self.num_bytes
            self._store.check_room(self._owner, len(data))
        append(self._file, data)

    def finish(self, filename: str, purpose: Purpose, expires_at: int | None) -> FileObject:
        try:
            self._store.check_room(self._owner)
            self._path.rename(self._store.path(self.id))
            os.close(self._file)
            self._file = -1
            file = FileObject(
                id=self.id,
                bytes=self.num_bytes,
                created_at=int(time.time()),
                expires_at=expires_at,
                filename=filename,
                purpose=purpose,
            )
            self._store.add(file)
        except OSError as error:
            self._store.delete(self.id)
            raise no_room(error) from error
        return file

    def drop(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with contextlib.suppress(OSError):
            self._path.unlink()


def append(file: int, data: bytes) -> None:
    """Write all of `data`. Raises RequestError (507) if the disk is full."""
    try:
        write_all(file, data)
    except OSError as error:
        raise no_room(error) from error


def no_room(error: OSError) -> RequestError:
    text = f"the file could not be stored: {error.strerror}; try again later"
    return RequestError(text, status=507, code="no_room", param="file", retry_after_s=30)


def _remove_abandoned(path: Path) -> None:
    """Remove an unfinished upload that no process is writing any more."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(file)


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes >> 20)

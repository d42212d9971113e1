"""Stored responses, as files of the run: every api process can read all of them, and they are removed with the run.

Used by the handlers of the api processes. Files are written atomically. The number of files and their bytes are limited; if
there is no room, the oldest ones of the source with the most are removed. An id begins with a digest of its source.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from api.access import owner_of

log = logging.getLogger(__name__)

MAX_RESPONSES = 1000
MAX_RESPONSE_BYTES = 2 << 20  # of one response, because a request that continues it reads it at once
MAX_BYTES = 64 << 20  # of all responses: run directories are often in memory
MAX_EVENTS_BYTES = 8 << 20  # of the events of a stream that can be read again
_ROOM_STEP = 1 << 18
_READ_BYTES = 1 << 16
_EVENTS = ".events"
_REQUEST = ".request"
_ID = re.compile(r"resp_[0-9a-f]{32}")
_OWNER = slice(5, 13)  # part of an id


class StoredResponse(msgspec.Struct):
    response: msgspec.Raw
    items: msgspec.Raw  # of the conversation up to its end, as they may be sent
    key: str = ""  # of the background request that generates it
    owner: str = ""  # the api process that generates it, and its epoch: NAME:EPOCH


class StoredRequest(msgspec.Struct):
    """Request of a background response, without the items that are stored with it."""

    fields: msgspec.Raw  # of the body, except `input`
    num_past: int  # items of earlier responses
    is_streaming: bool
    source: str
    priority: int
    replica: int  # requested by its client; -1: any
    seed: int
    arrival_ns: int  # CLOCK_MONOTONIC


class ResponseStore:
    def __init__(self, directory: Path, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    def new_id(self, source: str) -> str:
        """Return a new id for a response to a client of `source` (`source_of` in `api/access.py`)."""
        return f"resp_{owner_of(self._directory, source)}{secrets.token_hex(12)}"

    def save(self, response_id: str, data: bytes) -> bool:
        """Store a response; return whether it was stored."""
        if len(data) > min(self._max_bytes, MAX_RESPONSE_BYTES):
            return False
        return self._write(response_id, data)

    def _write(self, name: str, data: bytes) -> bool:
        unfinished = self._directory / f".{name}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._make_room(len(data))
            unfinished.write_bytes(data)
            unfinished.rename(self._directory / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            log.warning("failed to store a response: %s", error)
            return False
        return True

    def load(self, response_id: str) -> bytes | None:
        """Return a stored response; None: there is none, or it was removed."""
        if _ID.fullmatch(response_id) is None:
            return None
        try:
            return (self._directory / response_id).read_bytes()
        except OSError:
            return None

    def save_request(self, response_id: str, asked: StoredRequest) -> bool:
        """Store the request of a response until that has ended; return whether it was stored."""
        return self._write(f"{response_id}{_REQUEST}", msgspec.json.encode(asked))

    def load_request(self, response_id: str) -> StoredRequest | None:
        if _ID.fullmatch(response_id) is None:
            return None
        try:
            return msgspec.json.decode((self._directory / f"{response_id}{_REQUEST}").read_bytes(), type=StoredRequest)
        except (OSError, msgspec.DecodeError):
            return None

    def has_request(self, response_id: str) -> bool:
        return (self._directory / f"{response_id}{_REQUEST}").exists()

    def delete_request(self, response_id: str) -> None:
        """Remove the request of a response that has ended."""
        with contextlib.suppress(OSError):
            (self._directory / f"{response_id}{_REQUEST}").unlink()

    def requested_ids(self) -> list[str]:
        """Return the ids of all responses with a stored request."""
        try:
            return [name.removesuffix(_REQUEST) for name in os.listdir(self._directory) if name.endswith(_REQUEST)]
        except OSError:
            return []

    @contextlib.contextmanager
    def claiming(self) -> Iterator[bool]:
        """Yield whether this process alone may claim responses inside the block."""
        if not self._directory.exists():
            yield True
            return
        file = os.open(self._directory / ".claim", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            yield False
            return
        try:
            yield True
        finally:
            os.close(file)

    def append_events(self, response_id: str, data: bytes) -> bool:
        """Append events to a stream; return whether they were stored: there is a limit, and disks may be full."""
        path = self._directory / f"{response_id}{_EVENTS}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(file).st_size
                if size + len(data) > MAX_EVENTS_BYTES:
                    return False
                if size // _ROOM_STEP != (size + len(data)) // _ROOM_STEP:
                    self._make_room(_ROOM_STEP)
                return os.write(file, data) == len(data)
            finally:
                os.close(file)
        except OSError as error:
            log.warning("failed to store events of a response: %s", error)
            return False

    def events(self, response_id: str, begin: int) -> bytes | None:
        """Return whole events from byte `begin` on; None: none are stored."""
        if _ID.fullmatch(response_id) is None:
            return None
        try:
            with (self._directory / f"{response_id}{_EVENTS}").open("rb") as file:
                file.seek(begin)
                data = file.read(_READ_BYTES)
                while b"\n\n" not in data and (more := file.read(_READ_BYTES)):
                    data += more
        except OSError:
            return None
        return data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""

    def cut_events(self, response_id: str) -> bytes:
        """Return all whole events of a stream, and remove an incomplete rest, left by a process that died. Raises OSError."""
        path = self._directory / f"{response_id}{_EVENTS}"
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""
        os.truncate(path, len(whole))
        return whole

    def touch(self, response_ids: Iterable[str]) -> None:
        """Mark responses in progress as recently used, so that they are removed last."""
        for response_id in response_ids:
            for name in (response_id, f"{response_id}{_EVENTS}", f"{response_id}{_REQUEST}"):
                with contextlib.suppress(OSError):
                    os.utime(self._directory / name)

    def ids(self) -> list[str]:
        """Return the ids of all stored responses."""
        try:
            return [name for name in os.listdir(self._directory) if _ID.fullmatch(name)]
        except OSError:
            return []

    def delete(self, response_id: str) -> bool:
        """Delete a response; return whether there was one."""
        if _ID.fullmatch(response_id) is None:
            return False
        try:
            (self._directory / response_id).unlink()
        except OSError:
            return False
        (self._directory / f"{response_id}{_EVENTS}").unlink(missing_ok=True)
        self.delete_request(response_id)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest files of the source with the most files (or bytes, if these are too many). Other processes do the
        same, so a file may be gone already."""
        found: list[tuple[int, int, str]] = []  # time, bytes, name
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError):
                status = entry.stat()
                found.append((status.st_mtime_ns, status.st_size, entry.name))
        found.sort(reverse=True)
        num_files, sizes = Counter[str](), Counter[str]()
        for _, size, name in found:
            num_files[name[_OWNER]] += 1
            sizes[name[_OWNER]] += size
        while found and ((is_many := len(found) >= self._max_responses) or sizes.total() + num_bytes > self._max_bytes):
            (largest, _), *_ = (num_files if is_many else sizes).most_common(1)
            place = max(index for index, (_, _, name) in enumerate(found) if name[_OWNER] == largest)
            _, size, name = found.pop(place)
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
            num_files[largest] -= 1
            sizes[largest] -= size

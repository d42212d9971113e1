"""Responses that were answered, as files of the run: each api process finds those of all, and they end with the run.

Used by the handlers of the api processes. A file appears whole or not at all. The number of files and their bytes are limited;
where there is no room, the oldest of the source that has most go. An id begins with a digest of its source.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections import Counter
from pathlib import Path

log = logging.getLogger(__name__)

MAX_RESPONSES = 1000
MAX_RESPONSE_BYTES = 2 << 20  # of one: whoever goes on from it has it read at once
MAX_BYTES = 64 << 20  # of all: a run's directory is often in memory
_ID = re.compile(r"resp_[0-9a-f]{32}")
_OWNER = slice(5, 13)  # of an id


class ResponseStore:
    def __init__(self, directory: Path, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    def new_id(self, source: str) -> str:
        """An id for a response to a client of `source` (`source_of` of `api/access.py`)."""
        salt = str(self._directory).encode()  # of this run: the digest tells its reader nothing about an address
        owner = hashlib.blake2b(salt + b"\0" + source.encode(), digest_size=4).hexdigest()
        return f"resp_{owner}{secrets.token_hex(12)}"

    def save(self, response_id: str, data: bytes) -> bool:
        """Whether it is kept."""
        if len(data) > min(self._max_bytes, MAX_RESPONSE_BYTES):
            return False
        path = self._directory / response_id
        unfinished = self._directory / f".{response_id}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._make_room(len(data))
            unfinished.write_bytes(data)
            unfinished.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            log.warning("a response could not be stored: %s", error)
            return False
        return True

    def load(self, response_id: str) -> bytes | None:
        """None: there is none, or it had to go."""
        if _ID.fullmatch(response_id) is None:
            return None
        try:
            return (self._directory / response_id).read_bytes()
        except OSError:
            return None

    def ids(self) -> list[str]:
        """The ids of all stored responses."""
        try:
            return [name for name in os.listdir(self._directory) if _ID.fullmatch(name)]
        except OSError:
            return []

    def delete(self, response_id: str) -> bool:
        """Whether there was one."""
        if _ID.fullmatch(response_id) is None:
            return False
        try:
            (self._directory / response_id).unlink()
        except OSError:
            return False
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest files of the source that has the most files (or bytes, where these are too many). Other processes
        do the same: a file may be gone already."""
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

"""Engines of a router: a file with their addresses, read again when it changes, or a name that is looked up every second.

    10.0.0.1:9100
    10.0.0.2:9100    # text behind a number sign is ignored

    dns:engines.example:9100

Used by the link of a router. A list that cannot be used any more changes nothing, and the reason is reported once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from engine.errors import OptionError

LOOK_INTERVAL_NS = 500_000_000
LOOKUP_INTERVAL_S = 1.0
DNS = "dns:"
_MAX_FILE_BYTES = 1 << 20


class Address(msgspec.Struct, frozen=True, order=True):
    """Where an engine listens for routers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"tcp://{self}"


def parse_address(text: str) -> Address:
    """Return the address that `text` names, such as 10.0.0.1:9100 or [::1]:9100. Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if not colon or not host or (":" in host and not is_bracketed) or any(letter.isspace() for letter in host):
        raise ValueError("expected host:port, such as 10.0.0.1:9100")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{port or 'no'} port; expected a number from 1 to 65535")
    return Address(host, int(port))


def parse_list(lines: Iterable[str], source: str) -> tuple[Address, ...]:
    """Return the addresses in the lines of a file, each once. Raises OptionError that names the line, or if there is none."""
    found: dict[Address, None] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            found[parse_address(text)] = None
        except ValueError as error:
            raise OptionError(f"{source}, line {number}: {text[:100]!r}: {error}") from None
    if not found:
        raise OptionError(f"{source} names no engine; write one host:port in each line")
    return tuple(found)


class Membership(Protocol):
    """Source of the addresses."""

    def read(self) -> tuple[Address, ...]:
        """Return the addresses now. Raises OptionError."""

    def changed(self, now_ns: int) -> tuple[Address, ...] | None:
        """Return the addresses if they have changed since the last call; None: they have not, as far as known. Raises
        OptionError, once for each change."""


def membership_of(source: str) -> Membership:
    """Return the source that `--engines` names. Raises OptionError for a name without a port."""
    if not source.startswith(DNS):
        return EngineFile(source)
    try:
        return EngineNames(parse_address(source.removeprefix(DNS)))
    except ValueError as error:
        raise OptionError(f"--engines {source}: {error}") from None


class EngineNames:
    """The addresses of a name. A thread looks them up, since that may take long."""

    def __init__(self, name: Address) -> None:
        self._name = name
        self._found: tuple[Address, ...] | OptionError | None = None
        self._seen: tuple[Address, ...] | str | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> tuple[Address, ...]:
        """Look the name up now. Raises OptionError."""
        try:
            rows = socket.getaddrinfo(self._name.host, self._name.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise OptionError(f"cannot look up {self._name.host}, the name of the engines: {error}") from error
        return tuple(sorted({Address(str(row[4][0]), self._name.port) for row in rows}))

    def changed(self, now_ns: int) -> tuple[Address, ...] | None:
        """Return the addresses if they have changed since the last call. Raises OptionError, once for each cause."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_up, name="names", daemon=True)
            self._thread.start()
        found = self._found
        key = str(found) if isinstance(found, OptionError) else found
        if key == self._seen:
            return None
        self._seen = key
        if isinstance(found, OptionError):
            raise found
        return found

    def _look_up(self) -> None:
        while True:
            try:
                self._found = self.read()
            except OptionError as error:
                self._found = error
            time.sleep(LOOKUP_INTERVAL_S)


class EngineFile:
    """A file with the addresses of engines."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._next_look_ns = 0

    def read(self) -> tuple[Address, ...]:
        """Return the addresses in the file. Raises OptionError."""
        try:
            with open(self._path, encoding="utf-8") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not text"
            raise OptionError(f"cannot read the list of engines {self._path}: {cause}") from error
        if len(text) > _MAX_FILE_BYTES:
            raise OptionError(f"the list of engines {self._path} has more than {_MAX_FILE_BYTES} bytes")
        return parse_list(text.splitlines(), str(self._path))

    def changed(self, now_ns: int) -> tuple[Address, ...] | None:
        """Return the addresses if the file has changed since the last call, and it is time to look. Raises OptionError, once
        for each change."""
        if now_ns < self._next_look_ns:
            return None
        self._next_look_ns = now_ns + LOOK_INTERVAL_NS
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            seen = (0, 0, 0)
        if seen == self._seen:
            return None
        self._seen = seen
        return self.read()

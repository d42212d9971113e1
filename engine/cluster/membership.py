"""Which engines a router has: a file with their addresses, read again when it changes.

    10.0.0.1:9100
    10.0.0.2:9100    # text behind a number sign is ignored

Used by the link of a router. A file that cannot be used any more changes nothing, and the reason is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.errors import OptionError

LOOK_INTERVAL_NS = 500_000_000
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

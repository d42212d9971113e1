"""Relays the actors' logs to stderr, each line with its actor's name, if stderr is not a terminal: containers and services
collect logs there.

The supervisor checks in each turn whether a log has grown; a thread reads and writes, so that a slow reader of stderr delays no
actor. Lines that cannot be written yet stay in the log files. Output of an actor's libraries, its faulthandler and its
interpreter is in them too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import msgspec

from engine.process.log import json_line, printable
from engine.process.run_directory import Run
from engine.supervisor.line_writer import write_patiently

CHUNK_BYTES = 64 << 10
END_TIMEOUT_S = 1.0  # for the remaining lines when the engine has ended


class _Log(msgspec.Struct):
    name: str
    path: str
    position: int = 0  # read up to here
    rest: bytes = b""  # start of an incomplete line


class LogRelay:
    """`descriptor`: where lines are written. `close` ends it."""

    def __init__(self, run: Run, actors: Iterable[str], descriptor: int, log_format: str) -> None:
        self._logs = [_Log(name, str(run.log_path(name))) for name in actors]
        self._descriptor = descriptor
        self._is_json = log_format == "json"
        self._has_grown = threading.Event()
        self._is_ending = False
        self._end_s = 0.0  # monotonic: when the remaining lines are given up
        self._thread = threading.Thread(target=self._relay, name="logs", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Check for new lines. Called by the supervisor now and then."""
        if not self._has_grown.is_set() and any(_size(log.path) != log.position for log in self._logs):
            self._has_grown.set()

    def close(self) -> None:
        """Write the remaining lines, as far as a reader takes them."""
        self._end_s = time.monotonic() + END_TIMEOUT_S
        self._is_ending = True
        self._has_grown.set()
        self._thread.join(END_TIMEOUT_S + 1.0)

    # ------------------------------------------------------------------------------------------------------ the thread

    def _relay(self) -> None:
        try:
            while not self._is_ending:
                self._has_grown.wait()
                self._has_grown.clear()
                self._read_all()
            self._read_all()
            for log in self._logs:
                self._write(self._line(log, log.rest) if log.rest else b"")
        except OSError:
            return  # stderr is no longer read

    def _read_all(self) -> None:
        for log in self._logs:
            size = _size(log.path)
            if size < log.position:  # a new file
                log.position, log.rest = 0, b""
            while log.position < size:
                if not self._read(log):
                    break

    def _read(self, log: _Log) -> bool:
        """Read some whole lines; a line longer than the buffer comes in pieces. Return False if there are none."""
        try:
            with open(log.path, "rb", buffering=0) as file:
                file.seek(log.position)
                read = file.read(CHUNK_BYTES)
        except OSError:
            return False  # removed
        log.position += len(read)
        *lines, rest = (log.rest + read).split(b"\n")
        if len(rest) >= CHUNK_BYTES:
            lines, rest = [*lines, rest], b""
        log.rest = rest
        self._write(b"".join(self._line(log, line) for line in lines if line))
        return bool(read)

    def _line(self, log: _Log, line: bytes) -> bytes:
        if not self._is_json:
            return f"[{log.name}] ".encode() + line + b"\n"
        if line.startswith(b'{"time":'):  # written by us
            return line + b"\n"
        return json_line(log.name, "info", printable(line.decode(errors="replace"))) + b"\n"

    def _write(self, data: bytes) -> None:
        write_patiently(self._descriptor, data, lambda: self._is_ending and time.monotonic() > self._end_s)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0

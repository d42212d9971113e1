"""Answers of a batch on disk: a file in the order of the requests, to which whole lines are appended once each.

Answers that arrive out of order wait in memory, and in a file beside it (`OUT.part`), so that after a crash only requests in
flight are sent again. The next start reads both: a torn last line is cut off, and answered requests are skipped. An existing
file that is not a batch result is left alone. One process at a time owns a ledger.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from api.batches.lines import ANSWER_BEGINS, Request, answered
from engine.checkpoint.files import write_all
from engine.errors import OptionError

MAX_PART_BYTES = 16 << 20  # stale bytes at which the side file is rewritten
_REMEDY = "this file is needed for answers that arrive early; move it away, or choose another output file"


class Ledger:
    """`num_answered` requests have a line in the file, `num_failed` of these with an error; `early` has the lines of later
    requests."""

    def __init__(self, path: Path) -> None:
        """OptionError if the file cannot be opened, or another process owns it."""
        self.num_answered = 0
        self.num_failed = 0
        self.early: dict[str, bytes] = {}  # `Request.answer_id` -> line, of an earlier life
        self._path = path
        self._part_path = path.with_name(f"{path.name}.part")
        self._part = -1
        self._num_part_bytes = 0
        self._has_gone_on = False
        self._waiting: dict[int, tuple[Request, bytes]] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OptionError(f"-o {path}: {error.strerror}; choose another file") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise OptionError(f"-o {path} is not a regular file, so the batch could not be continued; choose another file")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                os.close(self._open_beside(self._part_path))
        except BlockingIOError:
            os.close(self._file)
            raise OptionError(f"-o {path} is in use by another run-batch; wait for it, or choose another file") from None
        except OptionError:
            os.close(self._file)
            raise

    def go_on(self, requests: Iterable[Request]) -> None:
        """Continue an existing file, which must answer the first of `requests`, and cut off a torn end. OptionError if it does
        not; the file is then left unchanged."""
        remaining = iter(requests)
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            begin = file.read(len(ANSWER_BEGINS))
            file.seek(0)
            lines = file if ANSWER_BEGINS.startswith(begin) else iter([begin + b"...\n"])
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and (line.startswith(ANSWER_BEGINS) or ANSWER_BEGINS.startswith(line)):
                    break
                self.num_failed += not self._is_well(number, line, next(remaining, None))
                self.num_answered = number
                end += len(line)
        os.ftruncate(self._file, end)
        self._read_part()
        self._has_gone_on = True

    def take(self, index: int, request: Request, line: bytes) -> None:
        """Add the answer to request `index`. OSError if the disk is full."""
        self._waiting[index] = request, line
        if index != self.num_answered:
            self._keep(line)
            return
        while (found := self._waiting.pop(self.num_answered, None)) is not None:
            self._append(*found)
        if self._num_part_bytes and not (self._waiting or self.early):
            self._num_part_bytes = 0
            os.truncate(self._part_path, 0)

    def close(self, is_complete: bool) -> None:
        """Close the files. `is_complete`: every request has a line."""
        with contextlib.suppress(OSError):  # the file system does not support it
            os.fsync(self._file)
        if is_complete and self._has_gone_on:  # otherwise its lines answer other requests
            self._part_path.unlink(missing_ok=True)
        if self._part >= 0:
            os.close(self._part)
        os.close(self._file)

    def _is_well(self, number: int, line: bytes, request: Request | None) -> bool:
        try:
            found = answered(line)
        except ValueError as error:
            raise OptionError(f"-o {self._path}: line {number} is not a batch answer: {error}; choose another file") from None
        if request is None:
            raise OptionError(f"-o {self._path} has more answers than there are requests (line {number}); choose another file")
        if found.custom_id != request.custom_id:
            raise OptionError(
                f"-o {self._path}: line {number} answers {found.custom_id!r}, but the request at this position is "
                f"{request.custom_id!r} (line {request.number}), so the file belongs to another batch; choose another "
                "file"
            )
        if found.answer_id != request.answer_id:
            raise OptionError(
                f"-o {self._path}: line {number} answers an earlier version of request {request.custom_id!r}: its url "
                f"or body in line {request.number} has changed since; choose another file, or delete this one to ask "
                "everything again"
            )
        return found.is_well

    def _read_part(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._part_path, "rb") as file:
            for line in file:
                try:
                    answer_id = answered(line).answer_id
                except ValueError:
                    break  # torn
                if not line.endswith(b"\n"):
                    break
                self._num_part_bytes += len(line)
                self.early[answer_id] = line

    def _append(self, request: Request, line: bytes) -> None:
        write_all(self._file, line)
        self.early.pop(request.answer_id, None)
        self.num_failed += not answered(line).is_well
        self.num_answered += 1

    def _keep(self, line: bytes) -> None:
        """Write the line to the side file, for the next start."""
        if self._part < 0:
            self._part = self._open_beside(self._part_path, os.O_CREAT)
            os.ftruncate(self._part, self._num_part_bytes)
        write_all(self._part, line)
        self._num_part_bytes += len(line)
        if self._num_part_bytes > MAX_PART_BYTES and self._num_part_bytes > 2 * self._num_waiting_bytes():
            self._write_part_anew()

    def _open_beside(self, path: Path, flags: int = 0) -> int:
        """Open our side file, or an empty one. OptionError if the file is not ours; FileNotFoundError if it is missing."""
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)
        except FileNotFoundError:
            raise
        except OSError as error:  # a link, a directory, another user's
            raise OptionError(f"-o {self._path}: {path} cannot be written: {error.strerror}; {_REMEDY}") from error
        is_regular = stat.S_ISREG(os.fstat(file).st_mode)
        begin = os.pread(file, len(ANSWER_BEGINS), 0) if is_regular else b""
        if not is_regular or not ANSWER_BEGINS.startswith(begin):
            os.close(file)
            raise OptionError(f"-o {self._path}: {path} exists and has no batch answers; {_REMEDY}")
        return file

    def _num_waiting_bytes(self) -> int:
        return sum(len(line) for _, line in self._waiting.values()) + sum(map(len, self.early.values()))

    def _write_part_anew(self) -> None:
        """Rewrite the side file atomically with the lines that still wait."""
        new_path = self._part_path.with_name(f"{self._part_path.name}.new")
        new = self._open_beside(new_path, os.O_CREAT)
        os.ftruncate(new, 0)
        lines = dict.fromkeys([*self.early.values(), *(line for _, line in self._waiting.values())])
        for line in lines:
            write_all(new, line)
        os.replace(new_path, self._part_path)
        os.close(self._part)
        self._part, self._num_part_bytes = new, sum(map(len, lines))

"""The answers of a batch: successful ones in one file, failed ones in another, one line each, in the order in which they
finish.

After a crash only requests in progress are repeated: the next life reads both files and cuts off an incomplete last line.
"""

from __future__ import annotations

import contextlib
import os

from api.batches.batch import StoredBatch
from api.batches.lines import ANSWER_BEGINS, answered
from api.files.store import FileObject, FileStore, append
from engine.errors import RequestError

_GRANT_BYTES = 1 << 20  # of answers for which room is checked at once: each check lists all files


class BatchLedger:
    """Writes answers. `num_well` and `num_failed` requests have their line; `answer_ids` are those of an earlier life."""

    def __init__(self, store: FileStore, stored: StoredBatch) -> None:
        """Open the files. Raises OSError."""
        self.num_well = self.num_failed = 0
        self.answer_ids: set[str] = set()
        self._store = store
        self._stored = stored
        self._files: dict[str, int] = {}
        self._num_granted_bytes = 0  # that there is room for
        self._well, self._failed = stored.output_id, stored.error_id
        for file_id in (self._well, self._failed):
            if store.path(file_id).exists():
                self._go_on(file_id)

    def take(self, line: bytes, is_well: bool) -> None:
        """Write a line. Raises RequestError if there is no room; then nothing of it is written."""
        file_id = self._well if is_well else self._failed
        if len(line) > self._num_granted_bytes or file_id not in self._files:
            self._num_granted_bytes = self._find_room(self._store.owner_of_id(file_id), len(line))
        file = self._open(file_id)
        size = os.fstat(file).st_size
        try:
            append(file, line)
        except RequestError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            raise
        self._num_granted_bytes -= len(line)
        self._count(is_well)

    def _find_room(self, owner: str, num_bytes: int) -> int:
        """Return how many bytes may be written, at least `num_bytes`. Raises RequestError if there is no room for these."""
        with contextlib.suppress(RequestError):
            self._store.check_room(owner, num_bytes + _GRANT_BYTES)
            return num_bytes + _GRANT_BYTES
        self._store.check_room(owner, num_bytes)
        return num_bytes

    def finish(self) -> tuple[str | None, str | None]:
        """Finish both files and return their ids; they can be found from now on. Raises OSError."""
        batch = self._stored.batch
        made: list[str | None] = []
        for file_id, kind in ((self._well, "output"), (self._failed, "error")):
            path = self._store.path(file_id)
            if not path.exists():
                made.append(None)
                continue
            with contextlib.suppress(OSError):  # on file systems that do not support it
                os.fsync(self._open(file_id))
            self._store.add(
                FileObject(
                    id=file_id,
                    bytes=path.stat().st_size,
                    created_at=batch.created_at,
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output",
                )
            )
            made.append(file_id)
        return made[0], made[1]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, file_id: str) -> int:
        if file_id not in self._files:
            try:
                path = self._store.path(file_id)
                self._files[file_id] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise RequestError(f"{error.strerror}", status=507, code="no_room") from error
        return self._files[file_id]

    def _go_on(self, file_id: str) -> None:
        file = self._open(file_id)
        end = 0
        with open(file, "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n") or not line.startswith(ANSWER_BEGINS):
                    break
                self.answer_ids.add(answered(line).answer_id)
                self._count(file_id == self._well)
                end += len(line)
        os.ftruncate(file, end)

    def _count(self, is_well: bool) -> None:
        self.num_well += is_well
        self.num_failed += not is_well

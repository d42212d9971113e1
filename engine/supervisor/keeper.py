"""Restores the files of a run while its engine lives: cleaners of /tmp, and a logout with RemoveIPC, may remove them.

Owned by the supervisor, which calls it once a second and before each start of a child. Memory and open connections do not
depend on names, and children get the segments by descriptor; but the next child, `tokamak top` and `ctl` look for names.
Missing files are restored:

    run directory, lock, link to it     as at the start; it is an error if another engine now uses the directory
    manifest.json, weights.json,        with their content
    adapters.json
    model.msgpack                       from the removed file, which is kept open because it may be large
    control.ipc                         bound a second time (the cache actor does so with its own)
    segments                            a symbolic link to this process's descriptor: a removed inode cannot be linked again

Only the content of removed logs is lost. A log appears again with the next life of its actor.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.files import open_file
from engine.errors import TokamakError
from engine.process.run_directory import Run, link_run, lock_run, make_private_directory, read_document, runs_root
from engine.process.segments import RunSegments
from engine.process.topology import SUPERVISOR
from engine.supervisor.progress import Progress
from shm.segment import DIRECTORY

if TYPE_CHECKING:
    from engine.process.control import ControlServer


class RunKeeper:
    """Restores the files of one living run. `close` releases the lock that it may have taken."""

    def __init__(self, run: Run, lock: int, segments: RunSegments, server: ControlServer, progress: Progress) -> None:
        """`lock`: the descriptor of the run's lock."""
        self._run = run
        self._lock = os.dup(lock)
        self._segments = segments
        self._server = server
        self._progress = progress
        self._model = open_file(run.model_path)
        self._documents: dict[Path, bytes] = {}
        self._trouble = ""
        self._num_made_again = segments.counters.counter("run_files_made_again_total", SUPERVISOR)
        self._is_incomplete = segments.counters.counter("is_run_incomplete", SUPERVISOR)
        self._remember()

    def keep(self) -> None:
        """Restore missing files; if that fails, report it once."""
        try:
            self.make_again()
            trouble = ""
        except (OSError, TokamakError) as error:
            trouble = f"files of the run in {self._run.directory} were removed and cannot be restored: {error}"
        if trouble != self._trouble:
            self._trouble = trouble
            self._progress.note(trouble or f"restored all files of the run in {self._run.directory}")
            if trouble:
                self._segments.counters.errors.record(SUPERVISOR, trouble)
        self._is_incomplete.set(1 if trouble else 0)

    def make_again(self) -> None:
        """Restore missing files. Raises OSError or StartError if that is not possible now."""
        made = [*self._make_directory(), *self._write_documents(), *self._server.bind_again(), *self._link_segments()]
        self._remember()
        if made:
            names = ", ".join(map(str, made))
            text = f"restored files that were removed while the engine was running: {names}; exclude them from cleanup jobs"
            self._num_made_again.add(len(made))
            self._segments.counters.errors.record(SUPERVISOR, text)
            self._progress.note(text)

    def close(self) -> None:
        os.close(self._model)
        os.close(self._lock)

    def _remember(self) -> None:
        for path in (self._run.manifest_path, self._run.adapters_path, *map(self._run.weights_path, self._segments.broadcasts)):
            with contextlib.suppress(FileNotFoundError):  # a scheduler has no weights file, or there are no adapters
                self._documents[path] = read_document(path)

    def _make_directory(self) -> list[Path]:
        if self._holds_lock():
            return []
        make_private_directory(runs_root())
        make_private_directory(self._run.directory)
        lock = lock_run(self._run)
        os.close(self._lock)
        self._lock = lock
        link_run(self._run)
        return [self._run.directory]

    def _holds_lock(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._run.lock_path), os.fstat(self._lock)) and self._run.is_linked()
        except FileNotFoundError:
            return False

    def _write_documents(self) -> list[Path]:
        missing = [path for path in self._documents if not path.exists()]
        for path in missing:
            self._run.write(path, self._documents[path])
        if not self._run.model_path.exists():
            self._run.write(self._run.model_path, os.pread(self._model, os.fstat(self._model).st_size, 0))
            missing.append(self._run.model_path)
        return missing

    def _link_segments(self) -> list[Path]:
        missing = []
        for name, descriptor in self._segments.descriptors.items():
            path = DIRECTORY / name[1:]
            if not os.path.lexists(path):
                path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
                missing.append(path)
        return missing

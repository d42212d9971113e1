"""Removes leftovers of provably dead engines, at the start of the next one.

Death is proven by the owner's identity (pid, start ticks, boot id) and by a lock that the kernel frees with the process, which
also works for an owner in another pid namespace, when containers share /dev/shm: the lock of the run or, for segments without a
run directory here, the lock on the counters file. Anything that cannot be proven dead, belongs to another user, or cannot be
examined (a link to itself, a FIFO, another user's directory: any user may create one in /dev/shm) stays, and does no harm.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.errors import StartError, TokamakError
from engine.process.run_directory import (
    LOCK_NAME,
    Run,
    is_run_id,
    link_run,
    lock_run,
    make_private_directory,
    open_run,
    resolve_entry,
    root_lock,
    run_entries,
    runs_root,
)
from engine.process.segments import is_held, unlink_segments
from engine.process.topology import SUPERVISOR
from engine.supervisor.unix_socket import remove_dead
from shm.counters import KIND, NAME, Counters
from shm.process import ProcessIdentity
from shm.segment import Segment, own_segment_names, segment_name

_KILL_TIMEOUT_S = 5.0
_Subject = TypeVar("_Subject")


def create_run(run_id: str, directory: Path) -> tuple[Run, int]:
    """Remove dead runs, then create the run `run_id` in `directory` and lock it; return the run and the descriptor of its
    lock."""
    root = runs_root()
    make_private_directory(root)
    with root_lock(root):
        reap(root)
        make_private_directory(directory)
        if os.path.lexists(directory / LOCK_NAME) and not _attempt(_reap_run, directory):
            raise StartError(f"{directory} is in use by another engine; stop it, or use another --run-dir")
        make_private_directory(directory)
        run = Run(run_id, directory)
        link_run(run)
        return run, lock_run(run)


def reap(root: Path) -> list[str]:
    """Remove everything that dead engines left; return the ids of their runs. The caller holds the root's lock."""
    reaped = [entry.name for entry in run_entries(root) if _attempt(_reap_run, entry)]
    living = {entry.name for entry in run_entries(root)}
    orphans = {name.split(".")[1] for name in own_segment_names()} - living
    return reaped + [run_id for run_id in sorted(filter(is_run_id, orphans)) if _attempt(_reap_orphan, run_id)]


def _attempt(reap_one: Callable[[_Subject], bool], subject: _Subject) -> bool:
    """Return whether `subject` was removed. What cannot be examined or removed is left alone."""
    try:
        return reap_one(subject)
    except (OSError, TokamakError):
        return False


def remove_run(run: Run) -> None:
    """Remove the files of the run, and its directory if nothing else is in it: a --run-dir may contain files of the user, or
    belong to another engine by now."""
    unlink_segments(run.run_id)
    is_ours = run.owner() in (None, ProcessIdentity.of())
    for path in run.files() if is_ours else []:
        with contextlib.suppress(OSError):  # already removed, or not our file (a directory)
            path.unlink()
    link = runs_root() / run.run_id
    if link.is_symlink():
        link.unlink()
    for directory in (run.packed_path, run.responses_path, run.files_path, run.directory):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _reap_run(entry: Path) -> bool:
    """Remove the run in `entry` (a directory, or a link to one) if its owner is dead."""
    try:
        directory = resolve_entry(entry)
    except FileNotFoundError:  # the user removed the --run-dir that the link points to
        if is_held(entry.name):
            return False  # of a living engine, which restores it
        unlink_segments(entry.name)
        entry.unlink()
        return True
    run = Run(_run_id_in(directory) or entry.name, directory)
    if run.is_alive():
        return False
    lock = lock_run(run)  # an error means that the lock is held, whatever the file says
    try:
        _kill_children(run.run_id)
        _remove_unix_socket(run)
        remove_run(run)
    finally:
        os.close(lock)
    return True


def _remove_unix_socket(run: Run) -> None:
    with contextlib.suppress(OSError, TokamakError):  # there is no manifest yet, or the file belongs to another user
        if path := run.manifest().config.uds:
            remove_dead(path)


def _run_id_in(directory: Path) -> str:
    with contextlib.suppress(TokamakError):
        run_id = open_run(directory).run_id
        return run_id if is_run_id(run_id) else ""
    return ""


def _reap_orphan(run_id: str) -> bool:
    """Remove this user's segments of a run without a directory if their creator is dead. Raises TokamakError if one of them has
    no header yet, or is gone."""
    if is_held(run_id):
        return False
    creators = [Segment.attach(name, is_readonly=True, timeout_s=0.0).owner for name in own_segment_names(run_id)]
    if any(creator.is_alive() for creator in creators):
        return False
    unlink_segments(run_id)
    return True


def _kill_children(run_id: str) -> None:
    """Kill processes in the dead engine's actor table, if they are still the same processes. The kernel has sent them SIGKILL
    at their parent's death; this is for one that survived it."""
    if segment_name(run_id, KIND, NAME) not in own_segment_names(run_id):
        return  # none, or it belongs to another user, who may have written any process into it
    try:
        counters = Counters.attach_readonly(run_id)
    except TokamakError:
        return
    try:
        actors = [actor for actor in counters.actors() if actor.name != SUPERVISOR and actor.pid]
        for actor in actors:
            _kill(ProcessIdentity(actor.pid, actor.start_ticks, counters.segment.owner.boot_id))
    finally:
        counters.close()


def _kill(identity: ProcessIdentity) -> None:
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if identity.is_alive():  # checked while the pidfd is held, so the signal goes to this process
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], _KILL_TIMEOUT_S)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(pidfd)

"""Clearing away what a provably dead engine left, at the start of the next one.

Dead is proven by the owner's identity (pid, start ticks, boot id) and by a lock that the kernel frees with the process, which
also tells of an owner in another pid namespace, as where containers share /dev/shm: the lock of the run or, of segments whose
run directory is not to be found here, the lock on the counters file. Whatever cannot be proven, or is another user's, stays.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from engine.errors import SharedMemoryError, StartError, TokamakError
from engine.process.run_directory import (
    LOCK_NAME,
    Run,
    is_run_id,
    lock_run,
    make_private_directory,
    open_run,
    root_lock,
    run_entries,
    runs_root,
)
from engine.process.segments import is_held, unlink_segments
from engine.process.topology import SUPERVISOR
from shm.counters import Counters
from shm.process import ProcessIdentity
from shm.segment import DIRECTORY, Segment, segment_names

_KILL_TIMEOUT_S = 5.0


def create_run(run_id: str, directory: Path) -> tuple[Run, int]:
    """Clear away dead runs, then make the run `run_id` in `directory` and lock it; the run and its lock's descriptor."""
    root = runs_root()
    make_private_directory(root)
    with root_lock(root):
        reap(root)
        make_private_directory(directory)
        if (directory / LOCK_NAME).exists() and not _reap_run(directory):
            raise StartError(f"{directory} is in use by another engine; stop it or give another directory with --run-dir")
        make_private_directory(directory)
        run = Run(run_id, directory)
        entry = root / run_id
        if entry != directory:
            entry.symlink_to(directory)
        return run, lock_run(run)


def reap(root: Path) -> list[str]:
    """Remove all that dead engines left; the ids of their runs. The caller holds the root's lock."""
    reaped = [entry.name for entry in run_entries(root) if _reap_run(entry)]
    living = {entry.name for entry in run_entries(root)}
    orphans = {name.split(".")[1] for name in segment_names()} - living
    return reaped + [run_id for run_id in sorted(orphans) if _reap_orphan(run_id)]


def remove_run(run: Run) -> None:
    """Remove what the run consists of, and its directory if nothing else is in it: a --run-dir may hold files of the user."""
    unlink_segments(run.run_id)
    for path in run.files():
        path.unlink(missing_ok=True)
    link = runs_root() / run.run_id
    if link.is_symlink():
        link.unlink()
    with contextlib.suppress(OSError):
        run.directory.rmdir()


def _reap_run(entry: Path) -> bool:
    """Remove the run in `entry` (a directory, or a link to one) if its owner is dead."""
    directory = entry.resolve()
    run = Run(_run_id_in(directory) or entry.name, directory)
    if not directory.is_dir():  # the user removed the --run-dir that the link points at
        unlink_segments(run.run_id)
        entry.unlink()
        return True
    if run.is_alive():
        return False
    try:
        lock = lock_run(run)
    except StartError:
        return False  # held, whatever the file says
    try:
        _kill_children(run.run_id)
        remove_run(run)
    finally:
        os.close(lock)
    return True


def _run_id_in(directory: Path) -> str:
    with contextlib.suppress(TokamakError):
        return open_run(directory).run_id
    return ""


def _reap_orphan(run_id: str) -> bool:
    """Remove the segments of a run without directory if they are ours and their creator is dead."""
    names = segment_names(run_id)
    if not is_run_id(run_id) or not all(map(_is_ours, names)) or is_held(run_id):
        return False
    try:
        creators = [Segment.attach(name, is_readonly=True, timeout_s=0.0).owner for name in names]
    except SharedMemoryError:
        return False  # it has no header (yet), or has gone
    if any(creator.is_alive() for creator in creators):
        return False
    unlink_segments(run_id)
    return True


def _is_ours(name: str) -> bool:
    try:
        return (DIRECTORY / name[1:]).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _kill_children(run_id: str) -> None:
    """End processes that the dead engine's actor table names, if they still are those processes. The kernel has sent them
    SIGKILL with their parent's death; this is for one that outlived it."""
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
        if identity.is_alive():  # asked after the pidfd is held: it is this process that gets the signal
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], _KILL_TIMEOUT_S)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(pidfd)

"""Identity of a process: pids are reused, (pid, start time, boot) is not.

The supervisor writes identities into segment headers, the actor table and its lock file. Before leftovers are removed,
`is_alive` of their owner is checked.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int  # clock ticks from boot to the start of the process
    boot_id: str

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """Return the identity of a living process (default: this one). ProcessLookupError if there is none."""
        pid = os.getpid() if pid is None else pid
        found = _state_and_start(pid)
        if found is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, found[1], boot_id())

    def is_alive(self) -> bool:
        """Return False only if the process has certainly ended: another boot, no such pid, a zombie, or the pid of a later
        process."""
        if self.boot_id != boot_id():
            return False
        found = _state_and_start(self.pid)
        if found is None:
            return _exists(self.pid)
        return found[1] == self.start_ticks and found[0] not in "ZX"


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _exists(pid: int) -> bool:
    """Return whether the process exists, even if /proc hides those of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to another user
    return True


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return fields 3 (state) and 22 (start time) of /proc/<pid>/stat. Field 2, the command, may hold spaces and
    parentheses."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # no such process, or /proc hides it
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])

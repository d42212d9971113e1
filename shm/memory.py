"""Available memory: of the machine, of this process's control group, and by its resource limits.

Read before a start to see whether a model fits, to choose the size of the cache, and before an arena is reserved.
"""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec

from shm.control_groups import ROOT, group_directories

_NO_LIMIT = 1 << 60  # version 1 writes a number as large as this for none


class MemoryLimit(msgspec.Struct, frozen=True):
    """`available_bytes` of `name`, as a user would call it."""

    name: str
    available_bytes: int


def available_memory_bytes(root: Path = ROOT) -> int:
    """Return the available bytes of the machine or of this process's control group. Page cache that can be dropped counts as
    free."""
    return min(limit.available_bytes for limit in memory_limits(root))


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the limits on the memory of all processes together, the machine's own first."""
    table = _table(root / "proc/meminfo")
    limits = [MemoryLimit("the machine", table["MemAvailable:"] * 1024)]
    for version, group in group_directories("memory", root):
        names = _FILES[version]
        try:
            limit = _limit((group / names[0]).read_text().strip())
            used, stat = int((group / names[1]).read_text()), _table(group / "memory.stat")
        except (OSError, ValueError):
            continue
        if limit >= _NO_LIMIT:
            continue
        reclaimable = sum(stat.get(name, 0) for name in names[2:])
        shown = "/" + str(group.relative_to(root / "sys/fs/cgroup"))
        limits.append(MemoryLimit(f"the control group {shown}", max(0, limit - used + reclaimable)))
    return limits


def num_oom_kills(root: Path = ROOT) -> int:
    """Return how many processes the kernel has killed because memory ran out, of the machine or of a control group; 0 where it
    does not count them."""
    try:
        return _table(root / "proc/vmstat").get("oom_kill", 0)
    except OSError:
        return 0


def process_limits() -> list[MemoryLimit]:
    """Return the resource limits on the memory of each process that is started from here."""
    found = []
    for kind, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_FSIZE, "ulimit -f")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(MemoryLimit(name, soft))
    return found


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
}  # by version: limit, usage, and lines of memory.stat


def _limit(text: str) -> int:
    """Parse a limit. Raises ValueError if it is none."""
    return _NO_LIMIT if text == "max" else int(text)


def _table(path: Path) -> dict[str, int]:
    """Parse a file of lines "name value ..."."""
    return {name: int(value) for name, value, *_ in (line.split() for line in path.read_text().splitlines() if " " in line)}

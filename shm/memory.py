"""Available memory, read to choose the size of the cache and before an arena is reserved."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes() -> int:
    """Return the available bytes of the machine or of this process's control group. Page cache that can be dropped counts as
    free."""
    available = _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = _table(group / "memory.stat")
    except OSError:
        return available
    reclaimable = stat["inactive_file"] + stat["active_file"]
    return available if limit == "max" else min(available, max(0, int(limit) - used + reclaimable))


def _table(path: Path) -> dict[str, int]:
    """Parse a file of lines "name value ..."."""
    return {name: int(value) for name, value, *_ in (line.split() for line in path.read_text().splitlines())}

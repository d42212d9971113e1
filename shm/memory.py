"""Available memory: asked when the size of the cache is chosen, and before an arena is reserved."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes() -> int:
    """Return the bytes that the machine, or this process's control group, can still give. Page cache that can be dropped counts
    as free."""
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
    """A file of lines "name value ..."."""
    return {name: int(value) for name, value, *_ in (line.split() for line in path.read_text().splitlines())}

"""Directories of this process's control group, version 1 or 2, from the group up to the root of its hierarchy.

Limits of every level apply. In a container the names in /proc/self/cgroup may be those of the host; levels without a directory
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def group_directories(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yield the version and directory of each level with `controller` ("memory", "cpu"). `root`: where /proc and /sys are."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            for base in (mounts, mounts / "unified"):
                if (base / "cgroup.controllers").exists():
                    yield from ((2, place) for place in _levels(base, name))
        elif controller in controllers.split(","):
            bases = (mounts / controllers, mounts / controller)
            yield from ((1, place) for place in _levels(next(filter(Path.exists, bases), mounts), name))


def _levels(base: Path, name: str) -> Iterator[Path]:
    group = base / name.strip("/")
    for place in (group, *group.parents):
        if place.is_dir():
            yield place
        if place == base:
            return

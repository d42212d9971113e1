"""Limits of memory and processors, read from the files that the kernel has for them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.options.resolve_ranks import available_cores
from shm.memory import MemoryLimit, available_memory_bytes, memory_limits, num_oom_kills, process_limits

GIB = 1 << 30
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, without control groups."""
    write(
        tmp_path, {"proc/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {8 * GIB // 1024} kB\n", "proc/vmstat": "oom_kill 3\n"}
    )
    return tmp_path


def second_version(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 0\n",
    }


def first_version(limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"cache 5\ntotal_inactive_file {inactive}\ntotal_active_file 0\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def under(place: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{place}{name}": text for name, text in files.items()}


def test_machine_without_groups(machine: Path) -> None:
    assert memory_limits(machine) == [MemoryLimit("the machine", 8 * GIB)]
    assert num_oom_kills(machine) == 3


def test_each_level_of_the_group_limits(machine: Path) -> None:
    """The process's own group, its parents, and not those of others."""
    files = {
        "proc/self/cgroup": "0::/system/engine\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        **under("system/engine/", second_version("max", 5)),
        **under("system/", second_version(str(3 * GIB), GIB, inactive=GIB // 2)),
        **under("", second_version("max", 5)),
        **under("other/", second_version("100", 5)),
    }
    write(machine, files)
    assert memory_limits(machine)[1:] == [MemoryLimit("the control group /system", 5 * GIB // 2)]
    assert available_memory_bytes(machine) == 5 * GIB // 2
    write(machine, under("system/engine/", second_version(str(GIB), 2 * GIB)))
    assert available_memory_bytes(machine) == 0


def test_groups_of_the_first_version(machine: Path) -> None:
    none = 9223372036854771712
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box/engine\n0::/\n",
        **under("memory/box/engine/", first_version(2 * GIB, GIB, inactive=GIB // 4)),
        **under("memory/box/", first_version(none, GIB)),
        **under("memory/", first_version(none, GIB)),
        **under("cpu,cpuacct/box/", {"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"}),
    }
    write(machine, files)
    assert memory_limits(machine)[1:] == [MemoryLimit("the control group /memory/box/engine", 5 * GIB // 4)]
    assert available_cores(machine) == 1


def test_container_sees_its_own_group_as_the_root(machine: Path) -> None:
    """The name is then that of the host, without a directory here."""
    files = {
        "proc/self/cgroup": "4:memory:/docker/1234\n",
        **under("memory/", first_version(GIB, 0)),
    }
    write(machine, files)
    assert memory_limits(machine)[1:] == [MemoryLimit("the control group /memory", GIB)]


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "0::/gone\n"},
        {"proc/self/cgroup": "4:memory:/x\n", **under("memory/x/", {"memory.limit_in_bytes": "junk"})},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/cgroup.controllers": "memory", **under("a/", second_version("junk", 5))},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "cpu", **under("", {"memory.max": "5"})},
    ],
)
def test_unreadable_groups_are_no_limit(files: dict[str, str], machine: Path) -> None:
    write(machine, files)
    assert memory_limits(machine)[1:] == []


def test_quota_of_processors(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/cgroup.controllers": "cpu\n"})
    write(machine, under("a/", {"cpu.max": "max 100000\n"}))
    assert available_cores(machine) == len(os.sched_getaffinity(0))
    write(machine, under("a/", {"cpu.max": "50000 100000\n"}))
    assert available_cores(machine) == 1


def test_resource_limits_of_a_process() -> None:
    code = "from shm.memory import process_limits; print([(limit.name, limit.available_bytes) for limit in process_limits()])"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (GIB, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))

    found = subprocess.run([sys.executable, "-c", code], preexec_fn=limited, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str([("ulimit -v", GIB), ("ulimit -f", MIB)])
    assert all(limit.available_bytes > 0 for limit in process_limits())

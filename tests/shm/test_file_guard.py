"""A guarded mapping survives changes of its file by another process."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shm.file_guard import FileGuard
from tests.paths import REPOSITORY

NUM_BYTES = 8 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"\x01" * NUM_BYTES)
    return path


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_truncated_part_reads_as_zeros(path: Path) -> None:
    data = mapped(path)
    guard = FileGuard(data)
    os.truncate(path, PAGE)
    assert data[:PAGE] == b"\x01" * PAGE
    assert not guard.is_lost
    assert data[PAGE:] == bytes(NUM_BYTES - PAGE)
    assert guard.is_lost


def test_other_mappings_are_not_lost(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(path.read_bytes())
    data, other = mapped(path), mapped(tmp_path / "other")
    guard, other_guard = FileGuard(data), FileGuard(other)
    os.truncate(path, 0)
    assert not any(data[:])
    assert guard.is_lost
    assert not other_guard.is_lost
    assert other[NUM_BYTES - 1] == 1


def test_threads_that_read_while_it_shrinks(path: Path) -> None:
    data = mapped(path)
    guard = FileGuard(data)

    def read() -> None:
        for _ in range(20):
            assert set(data[::PAGE]) <= {0, 1}

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for size in range(NUM_BYTES, -1, -NUM_BYTES // 16):
        os.truncate(path, size)
    for reader in readers:
        reader.join()
    assert set(data[::PAGE]) == {0}
    assert guard.is_lost


def test_closed_mappings_make_room(path: Path) -> None:
    for _ in range(5000):  # more than can be guarded at once
        with mapped(path) as data:
            assert not FileGuard(data).is_lost
            del data


UNGUARDED = """
import faulthandler, mmap, os, sys
if "dump" in sys.argv: faulthandler.enable()
from shm.file_guard import FileGuard
file = open(sys.argv[1], "r+b")
data, guarded = (mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for _ in range(2))
guard = FileGuard(guarded)
os.truncate(sys.argv[1], 0)
assert guarded[0] == 0 and guard.is_lost
data[0]
"""


@pytest.mark.parametrize("dump", ["dump", "none"])
def test_other_bus_errors_still_end_the_process(path: Path, dump: str) -> None:
    command = [sys.executable, "-c", UNGUARDED, str(path), dump]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGBUS
    assert ("Bus error" in ended.stderr) == (dump == "dump")


@pytest.mark.parametrize("is_guarded", [True, False])
def test_guard_precedes_handlers_set_later(path: Path, is_guarded: bool) -> None:
    """An actor enables Python's faulthandler, for example; without a guard the fault still ends the process by its signal."""
    code = f"""
import faulthandler, mmap, os
from shm.file_guard import FileGuard
first = FileGuard(mmap.mmap(-1, 4096))
faulthandler.enable()
with open({str(path)!r}, "rb") as file:
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
guard = FileGuard(data) if {is_guarded} else FileGuard(mmap.mmap(-1, 4096))
os.truncate({str(path)!r}, 0)
assert not any(data[:])
assert guard.is_lost
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if is_guarded else -signal.SIGBUS), done.stderr

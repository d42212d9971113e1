"""Segments and memory files: created atomically, checked by every process that attaches, removed by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shm import layout
from shm.errors import SharedMemoryError
from shm.inspection import segments
from shm.process import ProcessIdentity
from shm.segment import (
    DIRECTORY,
    MemoryFile,
    Segment,
    held_segment_names,
    hold_segments,
    release_segments,
    segment_name,
    segment_names,
    segment_prefix,
    unlink_segment,
)

PAGE = 4096

VERSION = f"version {layout.LAYOUT_VERSION}"


def test_attached_segment_is_the_same_memory(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    created = Segment.create(name, PAGE, epoch=7)
    attached = Segment.attach(name)
    attached.buffer[1000] = 42
    assert created.buffer[1000] == 42
    assert attached.buffer.nbytes == PAGE
    assert (attached.run_id, attached.header.text("kind"), attached.header.text("name")) == (run_id, "mailbox", "api0")
    assert attached.header.word("epoch") == 7
    assert attached.owner == ProcessIdentity.of()
    assert (DIRECTORY / name[1:]).stat().st_mode & 0o777 == 0o600


def test_readonly_attachment_cannot_write(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    Segment.create(name, PAGE)
    attached = Segment.attach(name, is_readonly=True)
    with pytest.raises(TypeError):
        attached.buffer[1000] = 42
    with pytest.raises(SharedMemoryError, match="mapped read-only"):
        attached.header.set_word("epoch", 1)


@pytest.mark.parametrize(
    ("run", "kind", "name"),
    [("xyz", "mailbox", "api0"), ("0123abcd", "Mail", "api0"), ("0123abcd", "mailbox", "a.b"), ("0123abcd", "mailbox", "../x")],
)
def test_bad_names_are_refused(run: str, kind: str, name: str) -> None:
    with pytest.raises(SharedMemoryError, match="is not"):
        segment_name(run, kind, name)


def test_name_that_exists_is_refused_and_left_alone(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    Segment.create(name, PAGE)
    with pytest.raises(SharedMemoryError, match="already exists"):
        Segment.create(name, PAGE)
    Segment.attach(name)


def test_a_held_segment_is_found_without_its_name(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    created = Segment.create(name, PAGE)
    hold_segments({name: os.open(DIRECTORY / name[1:], os.O_RDWR)})
    unlink_segment(name)
    attached, readonly = Segment.attach(name), Segment.attach(name, is_readonly=True)
    attached.buffer[1000] = 42
    assert created.buffer[1000] == readonly.buffer[1000] == 42
    assert held_segment_names(run_id) == [name]
    release_segments([name])
    with pytest.raises(SharedMemoryError, match="No such file"):
        Segment.attach(name)


def test_missing_segment_is_an_error_at_once(run_id: str) -> None:
    with pytest.raises(SharedMemoryError, match="No such file or directory; check that the engine of this run is alive"):
        Segment.attach(segment_name(run_id, "mailbox", "api0"))


def test_failed_initialisation_leaves_no_segment(run_id: str) -> None:
    def fail(buffer: memoryview) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Segment.create(segment_name(run_id, "mailbox", "api0"), PAGE, fail)
    assert segment_names(run_id) == []


def test_attach_waits_until_the_segment_is_whole(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    begun, go_on = threading.Event(), threading.Event()

    def initialise(buffer: memoryview) -> None:
        begun.set()
        assert go_on.wait(30)
        buffer[1000] = 1

    creator = threading.Thread(target=Segment.create, args=(name, PAGE, initialise))
    creator.start()
    assert begun.wait(30)
    with pytest.raises(SharedMemoryError, match=r"was not ready within 0.01 s"):
        Segment.attach(name, timeout_s=0.01)
    go_on.set()
    assert Segment.attach(name, timeout_s=30).buffer[1000] == 1
    creator.join()


def test_empty_file_of_dead_creator_is_not_ready(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    (DIRECTORY / name[1:]).touch()
    with pytest.raises(SharedMemoryError, match="not ready within"):
        Segment.attach(name, timeout_s=0.0)
    assert segment_names(run_id) == [name]
    assert name not in [segment.name for segment in segments()]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layout_hash", 1, f"layout {VERSION}, hash 0000000000000001; this build has {VERSION}"),
        ("layout_version", 9, "layout version 9, .* use that build, or restart the engine"),
        ("total_bytes", PAGE * 2, "has a size of 8192 bytes, but the file has 4096"),
        ("magic", 5, "is not a tokamak segment"),
    ],
)
def test_segment_of_another_build_is_refused(run_id: str, field: str, value: int, message: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    Segment.create(name, PAGE).header.set_word(field, value)
    with pytest.raises(SharedMemoryError, match=message):
        Segment.attach(name)


def test_lack_of_room_names_needed_and_free_bytes(run_id: str) -> None:
    too_much = shutil.disk_usage(DIRECTORY).total * 2
    with pytest.raises(SharedMemoryError, match=r"needs [\d.]+ [GT]iB, but /dev/shm has [\d.]+ [KMG]iB free; .*--shm-size"):
        Segment.create(segment_name(run_id, "mailbox", "api0"), too_much)
    assert segment_names(run_id) == []


def test_space_is_reserved_when_it_is_made(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    Segment.create(name, 64 * PAGE)
    assert (DIRECTORY / name[1:]).stat().st_blocks * 512 >= 64 * PAGE


def test_unlinked_segment_stays_mapped(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    segment = Segment.create(name, PAGE)
    segment.unlink()
    segment.unlink()
    assert not unlink_segment(name)
    segment.buffer[1000] = 1
    assert segment_names(run_id) == []


def test_closed_segment_stays_mapped_for_its_views(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "mailbox", "api0"), PAGE)
    view = segment.buffer[1000:1008]
    segment.close()
    view[0] = 1
    assert segment.buffer.nbytes == 0


def test_segments_name_their_owner(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    program = f"from shm.segment import Segment; Segment.create({name!r}, 4096); import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (found,) = [segment for segment in segments() if segment.run_id == run_id]
    assert (found.name, found.kind, found.num_bytes) == (name, "mailbox", PAGE)
    assert not found.owner.is_alive()


def test_resource_tracker_ignores_segments(run_id: str) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    program = (
        "import sys\nfrom shm.segment import Segment\nfrom shm.segment import MemoryFile\n"
        f"Segment.create({name!r}, 4096); MemoryFile.create('arena', 4096)\n"
        "sys.exit('multiprocessing.resource_tracker' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert segment_names(run_id) == [name]


def test_offsets_outside_a_segment_are_errors_not_crashes(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "mailbox", "api0"), PAGE)
    for offset in (PAGE - 4, PAGE, 1 << 60):
        with pytest.raises(SharedMemoryError, match="is outside a segment of 4096 bytes"):
            layout.StructView("SegmentHeader", segment.buffer, offset).word("magic")
    with pytest.raises(SharedMemoryError, match="is not aligned to 8"):
        layout.StructView("SegmentHeader", segment.buffer, 1).word("magic")


def test_memory_file_is_shared_by_descriptor() -> None:
    arena = MemoryFile.create("arena", 10 * PAGE)
    program = (
        "import sys; from shm.segment import MemoryFile; "
        "arena = MemoryFile.from_fd(int(sys.argv[1]), 40960); arena.buffer[40959] = 7; arena.close()"
    )
    subprocess.run([sys.executable, "-c", program, str(arena.fd)], pass_fds=[arena.fd], check=True)
    assert arena.buffer[10 * PAGE - 1] == 7
    arena.close()
    arena.close()


def test_memory_file_outlives_its_descriptor_and_cannot_shrink() -> None:
    arena = MemoryFile.create("arena", 2 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)
    view = arena.buffer
    arena.close()
    view[PAGE] = 1


def test_memory_file_of_another_size_is_refused() -> None:
    arena = MemoryFile.create("arena", 2 * PAGE)
    with pytest.raises(SharedMemoryError, match="has 8192 bytes, expected 4096"):
        MemoryFile.from_fd(arena.fd, PAGE)
    with pytest.raises(SharedMemoryError, match="no arena on file descriptor 9999: Bad file descriptor"):
        MemoryFile.from_fd(9999, PAGE)
    arena.close()


def test_memory_file_beyond_memory_is_refused() -> None:
    with pytest.raises(SharedMemoryError, match=r"needs [\d.]+ GiB of memory, [\d.]+ [MG]iB available; .*--num-kv-blocks"):
        MemoryFile.create("arena", 1 << 50)


def test_names_of_other_runs_are_not_listed(run_id: str) -> None:
    other = f"{int(run_id, 16) ^ 1:08x}"
    try:
        Segment.create(segment_name(run_id, "mailbox", "api0"), PAGE)
        Segment.create(segment_name(other, "mailbox", "api0"), PAGE)
        assert segment_names(run_id) == [f"{segment_prefix()}{run_id}.mailbox.api0"]
        assert {f"{segment_prefix()}{run_id}.mailbox.api0", f"{segment_prefix()}{other}.mailbox.api0"} <= set(segment_names())
    finally:
        unlink_segment(segment_name(other, "mailbox", "api0"))


def test_copy_of_a_segment_can_be_read_elsewhere(run_id: str, tmp_path: Path) -> None:
    name = segment_name(run_id, "mailbox", "api0")
    Segment.create(name, PAGE, epoch=3)
    shutil.copy(DIRECTORY / name[1:], tmp_path / "copy")
    assert Segment.attach_file(tmp_path / "copy", is_readonly=True).header.word("epoch") == 3

"""Segments (POSIX shared memory with the common header) and memory files (memfds for large arenas).

The supervisor creates both; actors attach. A segment is created exclusively, its space is reserved (an arena's is not), its
contents are initialised, and its magic is written last. A process that attaches waits for the magic and then checks layout and
run. Memory is unmapped with the last object that refers to it, so `close` never causes a use after free.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

import posix_ipc

from shm.errors import SharedMemoryError
from shm.layout import LAYOUT_HASH, LAYOUT_VERSION, MAGIC, MAX_NAME_BYTES, StructView, size_of
from shm.memory import available_memory_bytes
from shm.process import ProcessIdentity
from shm.sizes import size_text

DIRECTORY = Path("/dev/shm")
HEADER_BYTES = size_of("SegmentHeader")
NAMESPACE_VARIABLE = "TOKAMAK_SHM_NAMESPACE"  # letters and digits; engines only see segments of their own namespace
_RUN_ID = re.compile(r"[0-9a-f]{8}")
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_READY_POLL_S = 0.001

# name -> descriptor of a segment that this process created, or that was passed to it at its start
_held: dict[str, int] = {}


def segment_prefix() -> str:
    """Return the beginning of the names of all segments."""
    return f"/tokamak{os.environ.get(NAMESPACE_VARIABLE, '')}."


def segment_name(run_id: str, kind: str, name: str) -> str:
    """Return `/tokamak.<run id>.<kind>.<name>`, checked."""
    if not _RUN_ID.fullmatch(run_id):
        raise SharedMemoryError(f"run id {run_id!r} is not 8 hexadecimal characters")
    for what, text in (("kind", kind), ("name", name)):
        if not _NAME.fullmatch(text) or len(text) > MAX_NAME_BYTES:
            raise SharedMemoryError(f"segment {what} {text!r} is not a lower-case word of up to {MAX_NAME_BYTES} characters")
    return f"{segment_prefix()}{run_id}.{kind}.{name}"


def hold_segments(descriptors: Mapping[str, int]) -> None:
    """Make `attach` find these segments by descriptor, even if their names are removed."""
    _held.update(descriptors)


def release_segments(names: Iterable[str]) -> None:
    """Forget these segments and close their descriptors."""
    for name in names:
        os.close(_held.pop(name))


def held_segment_names(run_id: str) -> list[str]:
    """Return the segments of a run that this process holds."""
    return [name for name in _held if name.startswith(f"{segment_prefix()}{run_id}.")]


def segment_names(run_id: str = "") -> list[str]:
    """Return the names of all segments of a run, or of every run on this machine. Other users may create anything under such a
    name."""
    every = segment_prefix()[1:]
    prefix = f"{every}{run_id}." if run_id else every
    return sorted(f"/{name}" for name in os.listdir(DIRECTORY) if name.startswith(prefix) and "." in name[len(every) + 1 :])


def own_segment_names(run_id: str = "") -> list[str]:
    """Return the names that belong to this user. Those of others are never opened: their contents may be false, and an owner
    who truncates a file ends processes that have it mapped."""
    return [name for name in segment_names(run_id) if _is_own(DIRECTORY / name[1:])]


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False  # removed meanwhile
    return status.st_uid == os.getuid() and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode))


def unlink_segment(name: str) -> bool:
    """Remove a segment's name; existing mappings stay. False if there was none."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True


class Segment:
    """A mapped segment: `name`, `buffer` (all of it, header included), `run_id`, `kind`, `owner` (who created it)."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name = name
        self.buffer = memoryview(mapping)
        self.header = StructView("SegmentHeader", self.buffer)

    @classmethod
    def create(
        cls, name: str, num_bytes: int, initialise: Callable[[memoryview], None] | None = None, epoch: int = 0
    ) -> Segment:
        """Create a segment of `num_bytes`: zeros after the header, then the contents written by `initialise(buffer)`, then the
        magic. If anything fails, the name is removed again."""
        _, run_id, kind, short_name = name.split(".", 3)
        shared = _create_exclusively(name)
        try:
            reserve(shared.fd, num_bytes, f"segment {name}")
            segment = cls(name, mmap.mmap(shared.fd, num_bytes))
            write_header(segment.header, run_id, kind, short_name, num_bytes, epoch)
            if initialise is not None:
                initialise(segment.buffer)
            publish(segment.header)
        except BaseException:
            shared.unlink()
            raise
        finally:
            shared.close_fd()
        return segment

    @classmethod
    def attach(cls, name: str, *, is_readonly: bool = False, timeout_s: float = 5.0) -> Segment:
        """Map an existing segment once it is ready, by this process's descriptor if it holds one, otherwise by name.
        SharedMemoryError if there is none, it is not ready within `timeout_s`, or it belongs to another build or run."""
        path = DIRECTORY / name[1:]
        if name in _held:
            return cls._attach_descriptor(os.dup(_held[name]), path, is_readonly, timeout_s)
        return cls.attach_file(path, is_readonly=is_readonly, timeout_s=timeout_s)

    @classmethod
    def attach_file(cls, path: Path, *, is_readonly: bool = False, timeout_s: float = 5.0) -> Segment:
        """Attach by path, which may be a copy of a segment."""
        mode = os.O_RDONLY if is_readonly else os.O_RDWR
        try:
            fd = os.open(path, os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | mode)  # a FIFO would wait for its other end
        except OSError as error:
            raise SharedMemoryError(
                f"cannot attach to {path}: {error.strerror}; check that the engine of this run is alive"
            ) from error
        return cls._attach_descriptor(fd, path, is_readonly, timeout_s)

    @classmethod
    def _attach_descriptor(cls, fd: int, path: Path, is_readonly: bool, timeout_s: float) -> Segment:
        """Attach by descriptor, and take ownership of `fd`."""
        try:
            mapping = _map_when_ready(fd, path, mmap.ACCESS_READ if is_readonly else mmap.ACCESS_WRITE, timeout_s)
        finally:
            os.close(fd)
        return cls(f"/{path.name}", mapping)

    @property
    def owner(self) -> ProcessIdentity:
        return owner_of(self.header)

    @property
    def run_id(self) -> str:
        return self.header.text("run_id")

    def close(self) -> None:
        """Close the mapping. It is unmapped when the rings and cells made from it are gone too."""
        self.buffer = memoryview(b"")
        self.header = StructView("SegmentHeader", self.buffer)

    def unlink(self) -> None:
        """Remove the name, if it still exists."""
        unlink_segment(self.name)


class MemoryFile:
    """A memfd: an arena without a name, which lives until no process has it open or mapped. The supervisor keeps `fd` and
    passes it to children; `buffer` maps it.

    Its pages are allocated when first written, or by `reserve`, which takes a second per 3 GiB. So `create` only refuses an
    arena that is larger than available memory; `engine/cache/reservation.py` does the rest."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes

    @cached_property
    def buffer(self) -> memoryview:
        """The whole file, mapped."""
        return memoryview(mmap.mmap(self.fd, self.num_bytes))

    @classmethod
    def create(cls, name: str, num_bytes: int, *, is_sparse: bool = False) -> MemoryFile:
        """Create a file of `num_bytes` zero bytes. Its size cannot change under the processes that have it mapped. `is_sparse`:
        only few will be written."""
        available = available_memory_bytes()
        if num_bytes > available and not is_sparse:
            raise SharedMemoryError(
                f"arena {name} needs {size_text(num_bytes)} of memory, {size_text(available)} available; make it smaller "
                "(--num-kv-blocks or --kv-cache-memory) or free memory"
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def from_fd(cls, fd: int, num_bytes: int) -> MemoryFile:
        """Take ownership of an inherited memfd of `num_bytes` bytes."""
        try:
            actual = os.fstat(fd).st_size
        except OSError as error:
            raise SharedMemoryError(
                f"no arena on file descriptor {fd}: {error.strerror}; check that it was passed to this process"
            ) from error
        if actual != num_bytes:
            raise SharedMemoryError(f"the arena on file descriptor {fd} has {actual} bytes, expected {num_bytes}")
        return cls(fd, num_bytes)

    def reserve(self, offset: int, num_bytes: int) -> bool:
        """Allocate the pages of a part now and keep their contents. False if there is no room."""
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return True

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.buffer = memoryview(b"")


def reserve(fd: int, num_bytes: int, what: str) -> None:
    """Set a file's size and allocate its pages, for a clear error now instead of SIGBUS at a later store."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        volume = os.statvfs(fd)
        raise SharedMemoryError(
            f"not enough shared memory for {what}: it needs {size_text(num_bytes)}, but {DIRECTORY} has "
            f"{size_text(volume.f_bavail * volume.f_frsize)} free; remove leftover files there, enlarge it (docker run "
            "--shm-size, mount -o remount,size=...), or make the engine smaller (fewer --api-processes or "
            "--tokenizer-processes)"
        ) from error


def write_header(header: StructView, run_id: str, kind: str, name: str, num_bytes: int, epoch: int) -> None:
    """Write the common header except its magic."""
    creator = ProcessIdentity.of()
    header.set_text("run_id", run_id)
    header.set_text("kind", kind)
    header.set_text("name", name)
    header.set_text("boot_id", creator.boot_id)
    header.set_word("creator_pid", creator.pid)
    header.set_word("creator_start_ticks", creator.start_ticks)
    header.set_word("created_ns", time.time_ns())
    header.set_word("total_bytes", num_bytes)
    header.set_word("epoch", epoch)
    header.set_word("layout_version", LAYOUT_VERSION)
    header.set_word("layout_hash", LAYOUT_HASH)


def publish(header: StructView) -> None:
    """Write the magic, after which other processes can attach.

    SYNC: the store-release pairs with the load-acquire of magic in _map_when_ready and Slab.attach."""
    header.set_word("magic", MAGIC)


def check_header(header: StructView, what: str, num_bytes: int) -> None:
    """Raise SharedMemoryError unless a header with magic has this build's layout and the size of the file."""
    version, layout_hash = header.word("layout_version"), header.word("layout_hash")
    if (version, layout_hash) != (LAYOUT_VERSION, LAYOUT_HASH):
        raise SharedMemoryError(
            f"{what} has layout version {version}, hash {layout_hash:016x}; this build has version {LAYOUT_VERSION}, hash "
            f"{LAYOUT_HASH:016x}: the run was started by a different build of tokamak; use that build, or restart the engine"
        )
    if header.word("total_bytes") != num_bytes:
        raise SharedMemoryError(
            f"the header of {what} has a size of {header.word('total_bytes')} bytes, but the file has {num_bytes}"
        )


def owner_of(header: StructView) -> ProcessIdentity:
    return ProcessIdentity(header.word("creator_pid"), header.word("creator_start_ticks"), header.text("boot_id"))


def _create_exclusively(name: str) -> posix_ipc.SharedMemory:
    try:
        return posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError as error:
        raise SharedMemoryError(
            f"segment {name} already exists: another engine uses this run id, or died and left it behind"
        ) from error
    except (posix_ipc.PermissionsError, OSError) as error:
        raise SharedMemoryError(f"cannot create segment {name} in {DIRECTORY}: {error}") from error


def _map_when_ready(fd: int, path: Path, access: int, timeout_s: float) -> mmap.mmap:
    """Return the mapping once the creator has sized the file and written the magic."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise SharedMemoryError(f"{path} is not a file, so it cannot be a tokamak segment; remove it or use another path")
    deadline = time.monotonic() + timeout_s
    while True:
        num_bytes = os.fstat(fd).st_size
        if num_bytes >= HEADER_BYTES:
            mapping = mmap.mmap(fd, num_bytes, access=access)
            header = StructView("SegmentHeader", memoryview(mapping))
            # SYNC: the load-acquire pairs with the store-release in publish.
            magic = header.word("magic")
            if magic == MAGIC:
                check_header(header, str(path), num_bytes)
                return mapping
            if magic != 0:
                raise SharedMemoryError(f"{path} is not a tokamak segment: magic {magic:#x} instead of {MAGIC:#x}")
        if time.monotonic() > deadline:
            raise SharedMemoryError(f"{path} was not ready within {timeout_s} s: its creator died or hangs; restart the engine")
        time.sleep(_READY_POLL_S)

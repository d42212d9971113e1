"""All shared memory of a run: made by the supervisor (or a test) at once, removed with the run.

counters.main          counters file
mailbox.<receiver>     one per child
broadcast.scheduler    scheduler to workers
memfd                  KV arena: no name, vanishes with the last process that holds it
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import StartError
from engine.metrics import EVERY_ROLE, Metric, metrics_of
from engine.process.topology import ROLES, SCHEDULER, SUPERVISOR, RingSizes, ring_sizes, senders_of
from shm import counters
from shm.broadcast import BroadcastWriter
from shm.counters import Counters
from shm.mailbox import Mailbox
from shm.segment import (
    DIRECTORY,
    MemoryFile,
    hold_segments,
    let_go_of_segments,
    own_segment_names,
    segment_name,
    unlink_segment,
)

_OVERHEAD_BYTES = 4 << 20  # headers and the counters file


class RunSegments:
    """The segments of one run as its supervisor holds them. `descriptors`: of those with a name, by it; children get them, so
    that a name that was removed keeps no actor from coming back."""

    def __init__(self, run_id: str, names: Sequence[str], sizes: RingSizes, num_workers: int, arena_bytes: int) -> None:
        """`names`: the children. StartError where there is no room."""
        require_room(required_bytes(names, sizes), free_bytes())
        self._mailboxes: list[Mailbox] = []
        self.counters = Counters.create(run_id, (SUPERVISOR, *names), rows_of)
        self._hold = _lock_counters(run_id, fcntl.LOCK_SH)
        for name in names:
            senders = senders_of(name, names)
            self._mailboxes.append(Mailbox.create(run_id, name, senders, sizes.mailbox[name]))
        self.broadcast = BroadcastWriter.create(run_id, SCHEDULER, max(1, num_workers), sizes.broadcast)
        segments = [self.counters.segment, self.broadcast.segment, *(mailbox.segment for mailbox in self._mailboxes)]
        self.descriptors = {
            segment.name: os.open(DIRECTORY / segment.name[1:], os.O_RDWR | os.O_CLOEXEC) for segment in segments
        }
        hold_segments(self.descriptors)
        self.arena: MemoryFile | None = MemoryFile.create("tokamak-kv-arena", arena_bytes) if arena_bytes else None

    @classmethod
    def of(cls, config: EngineConfig, names: Sequence[str]) -> RunSegments:
        """The segments that `config` asks for."""
        sizes = ring_sizes(names, config.max_model_len)
        return cls(config.run_id, names, sizes, config.num_ranks, config.kv_cache_bytes)

    def close(self) -> None:
        """Let go of the mappings; the segments stay."""
        for mailbox in self._mailboxes:
            mailbox.close()
        self.broadcast.close()
        self.counters.close()
        if self.arena is not None:
            self.arena.close()
        let_go_of_segments(self.descriptors)
        os.close(self._hold)


def rows_of(role: str) -> tuple[Metric, ...]:
    """The metric rows of a role; an actor of a test has those that every role has."""
    return metrics_of(role) if role in ROLES else EVERY_ROLE


def unlink_segments(run_id: str) -> None:
    """Remove the names of all segments of `run_id` that are this user's; whoever has one mapped keeps it."""
    for name in own_segment_names(run_id):
        unlink_segment(name)


def is_held(run_id: str) -> bool:
    """Whether a living process, in whatever pid namespace, is the supervisor of these segments, or that cannot be told."""
    try:
        os.close(_lock_counters(run_id, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock_counters(run_id: str, operation: int) -> int:
    """A descriptor that locks the counters file until it is closed, at the latest by the end of the process."""
    path = DIRECTORY / segment_name(run_id, counters.KIND, counters.NAME)[1:]
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def required_bytes(names: Sequence[str], sizes: RingSizes) -> int:
    """What the segments take in /dev/shm."""
    rings = sum(sizes.mailbox[name] * len(senders_of(name, names)) for name in names)
    return rings + sizes.broadcast + _OVERHEAD_BYTES


def free_bytes() -> int:
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def require_room(needed: int, free: int) -> None:
    """StartError where `needed` bytes of shared memory are more than are `free`."""
    if needed > free:
        raise StartError(
            f"the rings need {_mebibytes(needed)} of shared memory, {DIRECTORY} has {_mebibytes(free)} free; enlarge it "
            "(docker run --shm-size=256m, or mount -o remount,size=256m /dev/shm), stop another engine, "
            "or lower --max-model-len, --api-processes or --tokenizer-processes"
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"

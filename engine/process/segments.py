"""All shared memory of a run: created by the supervisor (or a test) at once, removed with the run.

counters.main          counters file
mailbox.<receiver>     one per child
broadcast.<scheduler>  one per replica: scheduler to its ranks
experts.main           with shared experts: their placement, and rows per expert
prefix.<cache>         one per replica, if there are several: which blocks are cached there
trace.<actor>          while a trace is on: its last events (created by the tracing tool)
memfd                  KV arena, one per replica: no name, freed with the last process that holds it
memfd                  state arena, one per replica, for a model with recurrent layers
memfd                  adapter arena, if adapters are enabled
memfd                  comm arena, one per replica with several ranks, or one for all ranks that share experts

Also for a vision model:
notes.<media>          one per media process: the file it is decoding, and those that killed it
memfd                  media slab, one per api process: files of open requests
memfd                  pixel slab, one per media process
memfd                  encoder arena, one per replica: encoded features
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import StartError
from engine.parallel.placement import first_placement, owners
from engine.process.topology import (
    CACHE,
    LINK,
    MEDIA,
    ROLES,
    SCHEDULER,
    SUPERVISOR,
    RingSizes,
    actors_of,
    index_of,
    names_of,
    places_of,
    readers_of,
    ring_sizes,
    rings_bytes,
    role_of,
    senders_of,
)
from shm import counters
from shm.broadcast import BroadcastWriter
from shm.counters import Counters
from shm.death_notes import DeathNotes
from shm.encoder_arena import EncoderArena
from shm.experts import ExpertTable, SharedExperts
from shm.extent_slab import ExtentSlab
from shm.fingerprints import FingerprintSet, num_slots_for
from shm.mailbox import Mailbox
from shm.memory import available_memory_bytes
from shm.rank_group import RankGroupHeader
from shm.segment import (
    DIRECTORY,
    MemoryFile,
    hold_segments,
    own_segment_names,
    release_segments,
    segment_name,
    unlink_segment,
)
from shm.sizes import size_text

if TYPE_CHECKING:
    from engine.metrics import Metric

PREFIX_BYTES = 4 << 20  # of all replicas' fingerprints
_OVERHEAD_BYTES = 4 << 20  # headers and the counters file
_ARENA_ROLES = (CACHE, "worker")
ENCODER, ADAPTERS, STATES = "encoder", "adapters", "states"
_SLABS_OF_ROLE = {MEDIA: ("api", LINK), "worker": (MEDIA,)}  # roles of the slabs that they read


class MediaMemory(msgspec.Struct, frozen=True):
    """Sizes of slabs by the role of their producer, and of each replica's encoder arena."""

    slab_bytes: Mapping[str, int]
    encoder_bytes: int

    @staticmethod
    def of(config: EngineConfig) -> MediaMemory:
        return MediaMemory(slab_bytes_of(config), encoder_bytes_of(config))


def slab_bytes_of(config: EngineConfig) -> dict[str, int]:
    """Return the bytes of a producer's slab, by role."""
    return {"api": config.media_memory, LINK: config.media_memory, MEDIA: int(config.mm_processor_cache_gb * (1 << 30))}


def encoder_bytes_of(config: EngineConfig) -> int:
    return EncoderArena.num_bytes_of(config.encoder_cache_size, config.encoder_row_width, config.dtype)


class RunSegments:
    """The segments of a run, held by its supervisor. `descriptors`: of named segments, by name; children inherit them, so that
    an actor can restart even if a name was removed."""

    def __init__(
        self,
        run_id: str,
        names: Sequence[str],
        sizes: RingSizes,
        arena_bytes: int,
        num_fingerprints: int = 0,
        comm_bytes: int = 0,
        shared_experts: SharedExperts | None = None,
        media: MediaMemory | None = None,
        max_drafts: int = 0,
        max_loras: int = 0,
        adapter_bytes: int = 0,
        state_bytes: int = 0,
        *,
        has_cache_on_host: bool = True,
        has_traces: bool = False,
    ) -> None:
        """`names`: the children. `arena_bytes`: of each replica's KV arena. `num_fingerprints`: of each replica's cached blocks
        and states. `comm_bytes`: of the comm arena of each rank group (the ranks of a replica, or all that share experts).
        `media`: for a vision model. `max_drafts`: per row. `max_loras`, `adapter_bytes`: of the adapter arena. `state_bytes`:
        of each replica's state arena. Raises StartError if there is not enough memory."""
        require_room(required_bytes(names, sizes) + (shared_experts.num_bytes if shared_experts else 0), free_bytes())
        places = places_of(names)
        schedulers = actors_of(SCHEDULER, names)
        self._readers = {name: readers_of(name, names) for name in schedulers} or {SCHEDULER: actors_of("worker", names)}
        if places:
            self._readers = {}
        self._mailboxes: list[Mailbox] = []
        self.counters = Counters.create(
            run_id,
            (SUPERVISOR, *names),
            partial(rows_of, max_drafts=max_drafts, max_loras=max_loras, num_replicas=len(schedulers), are_places=bool(places)),
        )
        self._hold = _lock_counters(run_id, fcntl.LOCK_SH)
        for name in [name for name in names if name not in places]:
            senders = senders_of(name, names)
            self._mailboxes.append(Mailbox.create(run_id, name, senders, sizes.mailbox[name]))
        self.broadcasts = {
            scheduler: BroadcastWriter.create(run_id, scheduler, max(1, len(readers)), sizes.broadcast, readers or None)
            for scheduler, readers in self._readers.items()
        }
        segments = [self.counters.segment, *(ring.segment for ring in self.broadcasts.values())]
        segments += [mailbox.segment for mailbox in self._mailboxes]
        are_shared = len(self._readers) > 1 or LINK in names
        caches = names_of(CACHE, len(places)) if places else actors_of(CACHE, names) if are_shared else ()
        num_slots = num_slots_for(num_fingerprints, PREFIX_BYTES // max(1, len(caches)))
        self._prefixes = [FingerprintSet.create(run_id, cache, num_slots) for cache in caches]
        segments += [prefixes.segment for prefixes in self._prefixes]
        self._experts = ExpertTable.create(run_id, shared_experts) if shared_experts else None
        segments += [self._experts.segment] if self._experts else []
        self._notes = {name: DeathNotes.create(run_id, name) for name in actors_of(MEDIA, names)}
        segments += [notes.segment for notes in self._notes.values()]
        if has_traces:
            self._begin_traces(run_id, names)
        self.descriptors = {
            segment.name: os.open(DIRECTORY / segment.name[1:], os.O_RDWR | os.O_CLOEXEC) for segment in segments
        }
        hold_segments(self.descriptors)
        self.device_arenas: list[int] = []  # descriptors of the ranks' arenas in device memory, closed elsewhere; -1: none
        self.weight_shelves: list[tuple[int, int]] = []  # sockets of the ranks' weights in device memory, closed elsewhere
        self.arenas = _create_arenas(len(self._readers), arena_bytes, has_cache_on_host) if arena_bytes else []
        replicas = list(self._readers.values())
        self._rank_groups = [tuple(rank for ranks in replicas for rank in ranks)] if shared_experts else replicas
        self._comms = [MemoryFile.create("tokamak-comm-arena", comm_bytes) for _ in self._rank_groups] if comm_bytes else []
        self.rank_groups = [
            RankGroupHeader.begin(comm.buffer, len(ranks)) for comm, ranks in zip(self._comms, self._rank_groups, strict=False)
        ]
        self._adapters = MemoryFile.create("tokamak-adapters", adapter_bytes, is_sparse=True) if adapter_bytes else None
        self._states = [MemoryFile.create("tokamak-state-arena", state_bytes) for _ in self._readers] if state_bytes else []
        self._slabs: dict[str, MemoryFile] = {}  # by producer
        self._encoders: list[MemoryFile] = []  # by replica
        if media is not None:
            self._slabs = {
                name: _create_slab(run_id, slab_id, media.slab_bytes[role_of(name)])
                for slab_id, name in enumerate(
                    name for role in ("api", *(() if places else (LINK,)), MEDIA) for name in actors_of(role, names)
                )
            }
            self._encoders = [MemoryFile.create("tokamak-encoder-arena", media.encoder_bytes) for _ in self._readers]

    @classmethod
    def of(cls, config: EngineConfig, names: Sequence[str], layers: Sequence[int] = (), num_experts: int = 0) -> RunSegments:
        """Create the segments for `config`. `layers`: the layers of the model that have `num_experts` experts."""
        sizes = ring_sizes(names, config.max_model_len)
        return cls(
            config.run_id,
            names,
            sizes,
            config.kv_cache_bytes,
            config.num_kv_pages // config.kv_groups[0].num_tables + config.num_states,
            config.comm_bytes,
            _shared_experts(config, layers, num_experts) if config.enable_expert_parallel else None,
            MediaMemory.of(config) if config.media_processes else None,
            config.speculative_config.max_drafts,
            config.max_loras,
            config.adapter_bytes,
            config.state_bytes,
            has_cache_on_host=config.has_cache_on_host,
            has_traces=config.trace,
        )

    def _begin_traces(self, run_id: str, names: Sequence[str]) -> None:
        """Begin a trace by name only: an actor that cannot attach to its trace runs without one."""
        from shm.trace import TraceRing

        for name in names:
            TraceRing.create(run_id, name).close()
        self.counters.advance_trace_generation()

    def arena_of(self, name: str) -> MemoryFile | None:
        """Return the KV arena of the replica of a cache actor or rank; None: the actor gets none."""
        if role_of(name) not in _ARENA_ROLES or not self.arenas:
            return None
        if role_of(name) == CACHE:
            return self.arenas[index_of(name)]
        return self.arenas[_place_in(self._readers.values(), name)[0]]

    def device_arena_of(self, name: str) -> int:
        """Return the descriptor of a rank's KV arena in device memory; -1: the actor gets none."""
        return self.device_arenas[index_of(name)] if self.device_arenas and role_of(name) == "worker" else -1

    def weight_shelf_of(self, name: str) -> tuple[int, int]:
        """Return the sockets that keep a rank's weights in device memory; -1: the actor gets none."""
        return self.weight_shelves[index_of(name)] if self.weight_shelves and role_of(name) == "worker" else (-1, -1)

    def comm_of(self, name: str) -> MemoryFile | None:
        """Return the comm arena of a rank's rank group; None: the actor gets none."""
        return self._comms[_place_in(self._rank_groups, name)[0]] if self._comms and role_of(name) == "worker" else None

    def media_memory_of(self, name: str) -> dict[str, MemoryFile]:
        """Return the slabs and the arenas of features, adapters and states that an actor maps: slabs by the names of their
        producers, the arenas as `encoder`, `adapters` and `states`."""
        producers: tuple[str, ...] = _SLABS_OF_ROLE.get(role_of(name), ())
        if name == LINK and LINK not in self._slabs:  # a router's, which sends files to engines
            producers = ("api",)
        found = {producer: slab for producer, slab in self._slabs.items() if role_of(producer) in producers or producer == name}
        if self._encoders and role_of(name) == "worker":
            found[ENCODER] = self._encoders[_place_in(self._readers.values(), name)[0]]
        if self._adapters is not None and role_of(name) == "worker":
            found[ADAPTERS] = self._adapters
        if self._states and role_of(name) == "worker":
            found[STATES] = self._states[_place_in(self._readers.values(), name)[0]]
        return found

    def blame_file(self, name: str) -> bool:
        """Return whether an actor that died was decoding a file; its death then counts against that file."""
        return name in self._notes and bool(self._notes[name].count_death())

    def evict(self, worker: str) -> None:
        """End all waits for a rank that died: its scheduler's, and its peers', which continue in the next epoch of the rank
        group."""
        replica, rank = _place_in(self._readers.values(), worker)
        list(self.broadcasts.values())[replica].evict(rank)
        self.set_member(worker, False)

    def peers_of(self, worker: str) -> list[str]:
        """Return the other ranks of a rank's rank group."""
        rank_group, rank = _place_in(self._rank_groups, worker)
        return [name for place, name in enumerate(self._rank_groups[rank_group]) if place != rank]

    def set_member(self, worker: str, is_member: bool) -> None:
        """Set whether a rank takes part in its rank group."""
        if self.rank_groups:
            rank_group, rank = _place_in(self._rank_groups, worker)
            self.rank_groups[rank_group].set_member(rank, is_member)

    def close(self) -> None:
        """Release the mappings; the segments stay."""
        for mailbox in self._mailboxes:
            mailbox.close()
        for broadcast in self.broadcasts.values():
            broadcast.close()
        for prefixes in self._prefixes:
            prefixes.close()
        if self._experts is not None:
            self._experts.close()
        for notes in self._notes.values():
            notes.close()
        self.counters.close()
        adapters = [self._adapters] if self._adapters is not None else []
        for arena in (*self.arenas, *self._states, *self._comms, *self._slabs.values(), *self._encoders, *adapters):
            arena.close()
        release_segments(self.descriptors)
        os.close(self._hold)


def _shared_experts(config: EngineConfig, layers: Sequence[int], num_experts: int) -> SharedExperts:
    num_ranks = config.num_ranks
    first = first_placement(config.expert_placement_strategy, num_experts, num_ranks, config.num_redundant_experts)
    return SharedExperts(tuple(layers), num_experts, num_ranks, owners(first, num_experts).tobytes())


def _place_in(groups: Iterable[Sequence[str]], worker: str) -> tuple[int, int]:
    """Return the index of the rank's group in `groups`, and its index there."""
    return next((index, ranks.index(worker)) for index, ranks in enumerate(groups) if worker in ranks)


def _create_arenas(num_replicas: int, num_bytes: int, has_cache: bool) -> list[MemoryFile]:
    available = available_memory_bytes()
    if has_cache and num_replicas > 1 and num_replicas * num_bytes > available:
        raise StartError(
            f"the KV arenas of {num_replicas} replicas need {num_replicas} times {size_text(num_bytes)}, "
            f"{size_text(available)} are available; make them smaller (--num-kv-blocks or --kv-cache-memory), start fewer "
            "replicas (--data-parallel-size) or free memory"
        )
    return [MemoryFile.create("tokamak-kv-arena", num_bytes, is_sparse=not has_cache) for _ in range(num_replicas)]


def _create_slab(run_id: str, slab_id: int, capacity_bytes: int) -> MemoryFile:
    memory = MemoryFile.create("tokamak-slab", ExtentSlab.num_bytes_of(capacity_bytes))
    ExtentSlab.lay_out(memory, run_id, slab_id, capacity_bytes)
    return memory


def rows_of(
    role: str, max_drafts: int = 0, max_loras: int = 0, num_replicas: int = 1, *, are_places: bool = False
) -> tuple[Metric, ...]:
    """Return the metrics of a role, for the draft positions, adapter slots and replicas in use; an actor of a test has those of
    every role. `are_places`: the schedulers are places of a router."""
    # only for the supervisor: actors find their metrics in the counters file
    from engine.metrics import EVERY_ROLE, OF_PLACES, metrics_of

    if are_places and role == SCHEDULER:
        return OF_PLACES
    rows = metrics_of(role) if role in (*ROLES, LINK) else EVERY_ROLE
    limits = {"position": max_drafts, "adapter_slot": max_loras, "replica": num_replicas}
    return tuple(row for row in rows if all(row.place(label) < limit for label, limit in limits.items()))


def unlink_segments(run_id: str) -> None:
    """Remove the names of all segments of `run_id` that belong to this user; existing mappings stay."""
    for name in own_segment_names(run_id):
        unlink_segment(name)


def is_held(run_id: str) -> bool:
    """Return whether a living process, in any pid namespace, holds these segments as their supervisor, or this cannot be
    determined."""
    try:
        os.close(_lock_counters(run_id, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock_counters(run_id: str, operation: int) -> int:
    """Return a descriptor that locks the counters file until it is closed, at the latest at the end of the process."""
    path = DIRECTORY / segment_name(run_id, counters.KIND, counters.NAME)[1:]
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def required_bytes(names: Sequence[str], sizes: RingSizes) -> int:
    """Return the bytes that the segments take in /dev/shm."""
    has_prefixes = len(actors_of(SCHEDULER, names)) > 1 or LINK in names
    return rings_bytes(names, sizes) + (PREFIX_BYTES if has_prefixes else 0) + _OVERHEAD_BYTES


def free_bytes() -> int:
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def require_room(needed: int, free: int) -> None:
    """Raise StartError if `needed` bytes of shared memory are more than are `free`."""
    if needed > free:
        raise StartError(
            f"the rings need {size_text(needed)} of shared memory, {DIRECTORY} has {size_text(free)} free; enlarge it "
            "(docker run --shm-size=256m, or mount -o remount,size=256m /dev/shm), stop another engine, "
            "or lower --max-model-len, --api-processes, --tokenizer-processes or --data-parallel-size"
        )

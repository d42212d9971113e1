"""Everything an actor shares with the engine: configuration, mailbox, rings to others, counters, events to its supervisor.

Created by `engine/process/main.py` in each child process (and by tests), and passed to the `Actor` that the process runs.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Mapping
from functools import cached_property

from engine.config import EngineConfig
from engine.errors import CheckpointError, OptionError, OutsideError, TokamakError
from engine.messages import ActorState
from engine.process.events import EventSender
from engine.process.outbox import Outbox
from engine.process.run_directory import Run
from engine.process.segments import ADAPTERS, ENCODER, STATES, encoder_bytes_of, slab_bytes_of
from engine.process.topology import CACHE, SCHEDULER, SUPERVISOR, actors_of, index_of, partner_of, readers_of, ring_of, role_of
from engine.process.tracer import Tracer
from shm.counters import ActorRow, Cell, Counters, HistogramCells, State
from shm.encoder_arena import EncoderArena
from shm.extent_slab import ExtentSlab, SlabProducer
from shm.mailbox import Mailbox, MailboxSender
from shm.segment import MemoryFile

MAX_CAUSE_CHARACTERS = 8192  # of a failure, in an event


class ActorContext:
    """Everything an actor shares with the engine: its configuration, rings, counters and events to the supervisor."""

    def __init__(
        self,
        run: Run,
        config: EngineConfig,
        name: str,
        epoch: int,
        arena_fd: int = -1,
        comm_fd: int = -1,
        media_fds: Mapping[str, int] | None = None,
        events_fd: int = -1,
        listener_fd: int = -1,
        device_arena_fd: int = -1,
        weight_shelf_fds: tuple[int, int] = (-1, -1),
    ) -> None:
        """Set up the context. The descriptors are inherited by this process: memory files, those of slabs by the names of their
        producers, the event socket of the supervisor, and a listening socket."""
        self.run = run
        self.config = config
        self.name = name
        self.role = role_of(name)
        self.index = index_of(name)
        self.epoch = epoch
        self.log = logging.getLogger(f"tokamak.{name}")
        self.is_stopping = False  # after SIGTERM: the loop ends after this turn
        self.counters = Counters.attach(run.run_id)
        self.row: ActorRow = self.counters.actor(name)
        self.tracer = Tracer(run.run_id, name, self.counters)
        self.mailbox = Mailbox.attach(run.run_id, name, epoch)
        self.events = EventSender(events_fd)
        self._arena_fd = arena_fd
        self.device_arena_fd = device_arena_fd  # a rank's KV arena in device memory; -1: none that survives it
        self.weight_shelf_fds = weight_shelf_fds  # sockets that keep a rank's weights in device memory; -1: none
        self._comm_fd = comm_fd
        self._media_fds = media_fds or {}
        self.listener_fd = listener_fd
        self._outboxes: dict[str, Outbox] = {}

    def outbox(self, receiver: str) -> Outbox:
        """Return this actor's ring in `receiver`'s mailbox (attached on first use)."""
        outbox = self._outboxes.get(receiver)
        if outbox is None:
            outbox = self._outboxes[receiver] = Outbox(
                receiver,
                self._sender_to(receiver),
                self.counter("messages_sent_total"),
                self.counter("ring_full_total"),
            )
        return outbox

    def _sender_to(self, receiver: str) -> MailboxSender:
        mailbox, ring = ring_of(self.name, receiver, self._names)
        return MailboxSender.attach(self.run.run_id, mailbox, ring, self.epoch)

    def counter(self, name: str, **labels: str) -> Cell:
        """Return this actor's cell of the counter or gauge `name`."""
        return self.counters.counter(name, self.name, **labels)

    def histogram(self, name: str, **labels: str) -> HistogramCells:
        """Return this actor's cells of the histogram `name`."""
        return self.counters.histogram(name, self.name, **labels)

    def peer_epoch(self, name: str) -> int:
        """Return the current epoch of `name`; 0: it was never started, or it is an actor of a router elsewhere."""
        row = self._peer_rows.get(name)
        return row.epoch if row is not None else 0

    def is_peer_ready(self, name: str) -> bool:
        """Return whether `name` accepts work."""
        return self._peer_rows[name].state in (State.READY, State.RUNNING)

    def peers(self) -> list[str]:
        """Every other actor except the supervisor."""
        return list(self._peer_rows)

    @cached_property
    def schedulers(self) -> tuple[str, ...]:
        """Schedulers of all replicas, in order."""
        return actors_of(SCHEDULER, self._names)

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Ranks of this actor's replica, tensor rank 0 first."""
        return readers_of(self.scheduler, self._names)

    @property
    def tensor_rank(self) -> int:
        """Index of a rank in its replica."""
        return self.index % self.config.tensor_parallel_size

    @cached_property
    def scheduler(self) -> str:
        """The scheduler of this actor's replica."""
        return partner_of(self.name, SCHEDULER, self._names)

    @cached_property
    def cache(self) -> str:
        """The cache actor of this actor's replica."""
        return partner_of(self.name, CACHE, self._names)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """All actors except the supervisor."""
        return tuple(snapshot.name for snapshot in self.counters.actors() if snapshot.name != SUPERVISOR)

    @cached_property
    def _peer_rows(self) -> dict[str, ActorRow]:
        return {name: self.counters.actor(name) for name in self._names if name != self.name}

    def arena(self) -> MemoryFile:
        """The KV arena held by the supervisor (cache actor and workers only)."""
        if self._arena_fd < 0:
            raise TokamakError(f"{self.name} was started without the KV arena; only the cache actor and workers get it")
        return MemoryFile.from_fd(self._arena_fd, self.config.kv_cache_bytes)

    def comm_arena(self) -> MemoryFile | None:
        """The memory through which a rank and its peers exchange tensors; None: it has no peers."""
        if not self.config.comm_bytes:
            return None
        if self._comm_fd < 0:
            raise TokamakError(f"{self.name} was started without the comm arena; only workers get it")
        return MemoryFile.from_fd(self._comm_fd, self.config.comm_bytes)

    def own_slab(self) -> SlabProducer:
        """Return the slab that this actor fills: an api's media slab, a media process's pixel slab. Contents of its last life
        are dropped."""
        return SlabProducer(self._slab_memory(self.name))

    def media_slab(self, api: str) -> ExtentSlab:
        """Return the files of open requests, read by media processes."""
        return ExtentSlab(self._slab_memory(api))

    def pixel_slab(self, media: str) -> ExtentSlab:
        """Return the pixels, read by workers."""
        return ExtentSlab(self._slab_memory(media))

    def encoder_arena(self) -> EncoderArena:
        """Return the encoder arena of this rank's replica."""
        config = self.config
        memory = self._media_memory(ENCODER, encoder_bytes_of(config))
        return EncoderArena(memory, config.encoder_cache_size, config.encoder_row_width, config.dtype)

    def adapter_arena(self) -> MemoryFile | None:
        """The adapters of all ranks; None: adapters are disabled."""
        return self._media_memory(ADAPTERS, self.config.adapter_bytes) if self.config.adapter_bytes else None

    def state_arena(self) -> MemoryFile | None:
        """The recurrent states of this rank's replica; None: the model has none."""
        return self._media_memory(STATES, self.config.state_bytes) if self.config.state_bytes else None

    def _slab_memory(self, producer: str) -> MemoryFile:
        return self._media_memory(producer, ExtentSlab.num_bytes_of(slab_bytes_of(self.config)[role_of(producer)]))

    def _media_memory(self, name: str, num_bytes: int) -> MemoryFile:
        if name not in self._media_fds:
            raise TokamakError(f"{self.name} was started without the memory of {name}; it has that of {list(self._media_fds)}")
        return MemoryFile.from_fd(os.dup(self._media_fds[name]), num_bytes)

    def weights_in_use(self) -> tuple[str, int, str]:
        """Return path, version and contents of the weights that this rank must load; no contents: they were never loaded."""
        record = self.run.weights(self.scheduler)
        path, version = record.ranks[self.tensor_rank]
        return path, version, record.contents.get(version, "")

    def request_stop(self) -> None:
        """End the loop after the current turn."""
        self.is_stopping = True

    def announce_ready(self) -> None:
        """Report in the actor table and to the supervisor that this actor accepts work."""
        self.row.beat(time.monotonic_ns())
        self.row.set_state(State.READY)
        self.events.send(ActorState(self.name, self.epoch, State.READY.name))

    def announce_failure(self, error: BaseException) -> None:
        """Report the cause in the log, in the error table and to the supervisor."""
        if isinstance(error, TokamakError):
            text = str(error)
            self.log.error("%s", text)
        else:
            text = f"{type(error).__name__}: {error}"
            self.log.error("%s", "".join(traceback.format_exception(error)))
        self.counters.errors.record(self.name, text)
        self.row.set_state(State.FAILED)
        text, is_from_outside = text[:MAX_CAUSE_CHARACTERS], isinstance(error, OutsideError)
        is_mistake = isinstance(error, OptionError | CheckpointError)
        self.events.send(ActorState(self.name, self.epoch, State.FAILED.name, text, is_from_outside, is_mistake))

    def close(self) -> None:
        """Release the shared memory."""
        for outbox in self._outboxes.values():
            outbox.close()
        self.tracer.stop()
        self.mailbox.close()
        self.counters.close()

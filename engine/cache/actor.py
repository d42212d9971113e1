"""The cache actor: holds the KV arena, publishes KV events, and answers moves of blocks between tiers.

One process for each replica. The supervisor owns the arena's memory, so the KV outlives this process and the workers. Blocks on
other tiers (host, disk, remote) will be moved by BlocksMove; today only the device tier exists, and any other is rejected.
Between messages it reserves the arena's memory (`reservation.py`).
"""

from __future__ import annotations

import time

from engine.cache.kv_events import IndexChange, KvEventPublisher, endpoint_of
from engine.cache.reservation import ArenaReservation
from engine.messages import (
    BlocksCleared,
    BlocksMove,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    Hello,
    Message,
    StatesRemoved,
    StatesStored,
)
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, earliest
from engine.process.topology import SUPERVISOR
from shm.counters import State
from shm.fingerprints import KIND, FingerprintWriter, fingerprint_of, state_fingerprint_of
from shm.segment import Segment, segment_name

DEVICE = "device"


class CacheActor(Actor):
    """Holds the arena, publishes KV events, and answers moves."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._arena = context.arena()
        self._reservation = ArenaReservation(self._arena, context.counter("kv_arena_reserved_bytes"), self._warn)
        self._supervisor = context.counters.actor(SUPERVISOR)
        given = context.config.kv_events_endpoint
        endpoint = endpoint_of(context.name, given) if given else context.run.kv_events_endpoint(context.name)
        self._publisher = KvEventPublisher(endpoint, context.counter("kv_events_total"))
        self._prefixes: FingerprintWriter | None = None  # for routing by tokenizers and routers, if there is a choice
        if context.config.data_parallel_size > 1 or context.config.has_link:
            self._prefixes = FingerprintWriter(Segment.attach(segment_name(context.run.run_id, KIND, context.name)))
        self._to_scheduler = BackloggedOutbox(context.outbox(context.scheduler).send_bytes)
        self._to_scheduler.post(Hello(context.name, context.epoch))

    def on_start(self) -> None:
        self.context.counter("kv_arena_bytes").set(self._arena.num_bytes)
        self._publisher.start()

    def on_message(self, sender: str, message: Message) -> None:
        match message:
            case BlocksStored() | BlocksRemoved() | BlocksCleared() | StatesStored() | StatesRemoved():
                self._note(message)
                self._publisher.add(message)
            case BlocksMove():
                self._to_scheduler.post(BlocksMoved(message.move_id, refusal(message)))
            case _:
                raise AssertionError(f"unexpected {type(message).__name__} from {sender}")

    def on_peer(self, name: str, epoch: int) -> None:
        """Drop answers to an earlier life of the scheduler: the new one knows no moves."""
        if name == self.context.scheduler:
            self._to_scheduler.clear()

    def do_work(self) -> int:
        """Publish the received events as one batch, and answer the scheduler."""
        num_done = self._publisher.publish() + self._to_scheduler.flush()
        self._publisher.keep_socket(time.monotonic_ns())
        if self._reserves:
            self._reservation.advance()
        return num_done

    def deadline_ns(self) -> int:
        return earliest(self._to_scheduler.deadline_ns(), self._reservation.next_ns if self._reserves else 0)

    def on_stop(self) -> None:
        self._publisher.close()
        self._arena.close()

    @property
    def _reserves(self) -> bool:
        """Whether memory is left to reserve and the start is over. A cache in device memory has next to none here."""
        return self.context.config.has_cache_on_host and not self._reservation.is_done and self._supervisor.state is State.READY

    def _note(self, change: IndexChange) -> None:
        """Update the fingerprints of the cached blocks and states, by which tokenizers choose replicas."""
        if self._prefixes is None:
            return
        match change:
            case BlocksStored():
                self._prefixes.add_all(map(fingerprint_of, change.block_hashes))
            case BlocksRemoved():
                self._prefixes.remove_all(map(fingerprint_of, change.block_hashes))
            case StatesStored():
                self._prefixes.add_all(map(state_fingerprint_of, change.block_hashes))
            case StatesRemoved():
                self._prefixes.remove_all(map(state_fingerprint_of, change.block_hashes))
            case BlocksCleared():
                self._prefixes.clear()

    def _warn(self, text: str) -> None:
        self.context.log.warning("%s", text)
        self.context.counters.errors.record(self.context.name, text)


def refusal(move: BlocksMove) -> str:
    """Return why a move cannot be done; empty if nothing has to move."""
    other = next((tier for tier in (move.source, move.target) if tier != DEVICE), None)
    return f"unknown tier {other!r}; expected {DEVICE!r}" if other is not None else ""

"""The cache messenger: holds the KV arena and tells the outside what the prefix cache holds.

One process. The supervisor owns the arena's memory, so the KV outlives this process as it outlives the workers. Cache-aware
routers subscribe to its ZeroMQ PUB socket; one multipart message is a batch, in vLLM's event style:

    b"kv" | sequence number (u64, big endian) | msgpack [time, [event, ...]]

    {"type": "BlockStored", "block_hashes", "parent_block_hash", "token_ids", "block_size"}     a chain of full blocks
                           with media also "extra_keys": of each block null or [[unit's hash, its first token there], ...]
    {"type": "BlockRemoved", "block_hashes"}
    {"type": "AllBlocksCleared"}

A gap in the numbers means that the subscriber was too slow; a number that goes back means that this actor was started again,
and then AllBlocksCleared and everything that is cached follow. Blocks on other tiers (host, disk, remote) will be moved by
BlocksMove; today only the device tier exists, and any other is refused. Between messages the arena's memory is reserved
(`reservation.py`).
"""

from __future__ import annotations

import contextlib
import time
from array import array

import msgspec
import zmq

from engine.cache.reservation import ArenaReservation
from engine.messages import BlocksCleared, BlocksMove, BlocksMoved, BlocksRemoved, BlocksStored, Hello, Message
from engine.messages.cache import ExtraKeys
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.control import bind_again
from engine.process.outbox import BackloggedOutbox, earliest
from engine.process.topology import CACHE, SUPERVISOR, index_of
from shm.counters import State
from shm.fingerprints import KIND, FingerprintWriter, fingerprint_of
from shm.segment import Segment, segment_name

TOPIC = b"kv"
DEVICE = "device"
MAX_UNREAD_BATCHES = 100_000  # kept for a subscriber that lags; what is more is lost to it
LOOK_INTERVAL_NS = 1_000_000_000


class BlockStored(msgspec.Struct, tag_field="type", tag=True, frozen=True, omit_defaults=True):
    """Blocks that became reusable, each the parent of the next."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    extra_keys: list[ExtraKeys | None] | None = None  # what else their hashes hold


class BlockRemoved(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """Blocks that were evicted."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """Nothing is cached any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheMessengerActor(Actor):
    """Arena, KV events, and the answers to moves."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._arena = context.arena()
        self._reservation = ArenaReservation(self._arena, context.counter("kv_arena_reserved_bytes"), self._warn)
        self._supervisor = context.counters.actor(SUPERVISOR)
        given = context.config.kv_events_endpoint
        self._endpoint = endpoint_of(context.name, given) if given else context.run.kv_events_endpoint(context.name)
        self._prefixes: FingerprintWriter | None = None  # tokenizers route by them where there are several replicas
        if context.config.data_parallel_size > 1:
            self._prefixes = FingerprintWriter(Segment.attach(segment_name(context.run.run_id, KIND, context.name)))
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._zmq.socket(zmq.PUB)
        self._sequence = 0
        self._next_look_ns = 0
        self._events: list[KvEvent] = []
        self._to_scheduler = BackloggedOutbox(context.outbox(context.scheduler).send_bytes)
        self._to_scheduler.post(Hello(context.name, context.epoch))
        self._num_events = context.counter("kv_events_total")

    def on_start(self) -> None:
        self.context.counter("kv_arena_bytes").set(self._arena.num_bytes)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_BATCHES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._endpoint)

    def on_message(self, sender: str, message: Message) -> None:
        match message:
            case BlocksStored(block_hashes, parent_hash, token_ids, block_size, _, extra):
                if self._prefixes is not None:
                    self._prefixes.add_all(map(fingerprint_of, block_hashes))
                tokens = array("i", token_ids).tolist()
                extra_keys = [keys or None for keys in extra] or None
                self._events.append(BlockStored(block_hashes, parent_hash or None, tokens, block_size, extra_keys))
            case BlocksRemoved(block_hashes):
                if self._prefixes is not None:
                    self._prefixes.remove_all(map(fingerprint_of, block_hashes))
                self._events.append(BlockRemoved(block_hashes))
            case BlocksCleared():
                if self._prefixes is not None:
                    self._prefixes.clear()
                self._events.append(AllBlocksCleared())
            case BlocksMove():
                self._to_scheduler.post(BlocksMoved(message.move_id, refusal(message)))
            case _:
                raise AssertionError(f"{type(message).__name__} from {sender} has no business here")

    def on_peer(self, name: str, epoch: int) -> None:
        """A new scheduler knows of no moves that its predecessor asked for."""
        if name == self.context.scheduler:
            self._to_scheduler.clear()

    def do_work(self) -> int:
        """Publish what came, as one batch, and answer the scheduler."""
        num_done = self._publish() + self._to_scheduler.flush()
        self._keep_socket(time.monotonic_ns())
        if self._reserves:
            self._reservation.advance()
        return num_done

    def deadline_ns(self) -> int:
        return earliest(self._to_scheduler.deadline_ns(), self._reservation.next_ns if self._reserves else 0)

    def on_stop(self) -> None:
        self._publish()
        self._socket.close()
        self._zmq.term()
        self._arena.close()

    @property
    def _reserves(self) -> bool:
        """There is memory left to reserve, and the start is over. Of memory of the host that is no cache little is used."""
        return self.context.config.has_cache_on_host and not self._reservation.is_done and self._supervisor.state is State.READY

    def _warn(self, text: str) -> None:
        self.context.log.warning("%s", text)
        self.context.counters.errors.record(self.context.name, text)

    def _keep_socket(self, now_ns: int) -> None:
        """Somebody may remove the socket's file under the engine; subscribers that come later look for it."""
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_INTERVAL_NS
            with contextlib.suppress(OSError):  # there is no directory: the supervisor says so, and makes it again
                bind_again(self._socket, self._endpoint)

    def _publish(self) -> int:
        """Never blocks: a PUB socket drops what a subscriber has no room for, and the gap in the numbers shows it."""
        events, self._events = self._events, []
        if events:
            payload = msgspec.msgpack.encode((time.time(), events))
            self._socket.send_multipart((TOPIC, self._sequence.to_bytes(8, "big"), payload))
            self._sequence += 1
            self._num_events.add(len(events))
        return len(events)


def endpoint_of(cache: str, given: str) -> str:
    """Where replica k publishes if the engine was `given` an endpoint: on the TCP port + k, or at a path that ends with k."""
    address, _, port = given.rpartition(":")
    if given.startswith("tcp:") and port.isdecimal():
        return f"{address}:{int(port) + index_of(cache)}"
    return f"{given}.{index_of(cache)}" if cache != CACHE else given


def refusal(move: BlocksMove) -> str:
    """Why a move cannot be done; empty where there is nothing to do for it."""
    other = next((tier for tier in (move.source, move.target) if tier != DEVICE), None)
    return f"there is no tier {other!r}, only {DEVICE!r}" if other is not None else ""

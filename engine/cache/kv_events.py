"""KV events: a ZeroMQ PUB socket that informs cache-aware routers about the prefix cache.

Owned by the cache actor. One multipart message is a batch, in vLLM's event style:

    b"kv" | sequence number (u64, big endian) | msgpack [time, [event, ...]]

    {"type": "BlockStored", "block_hashes", "parent_block_hash", "token_ids", "block_size"}     a chain of full blocks
                           with media also "extra_keys": for each block null or [[unit's hash, its first token there], ...]
    {"type": "BlockRemoved", "block_hashes"}
    {"type": "AllBlocksCleared"}
    {"type": "StateStored", "block_hashes"}    of models with recurrent layers: sequences can continue after these blocks,
    {"type": "StateRemoved", "block_hashes"}   and now they cannot; AllBlocksCleared removes all states, too

A gap in the numbers means that the subscriber was too slow. A lower number means that the publisher was restarted;
AllBlocksCleared and all cached blocks follow.
"""

from __future__ import annotations

import contextlib
import time
from array import array

import msgspec
import zmq

from engine.messages import BlocksCleared, BlocksRemoved, BlocksStored, StatesRemoved, StatesStored
from engine.messages.cache import ExtraKeys
from engine.process.control import bind_again
from engine.process.topology import CACHE, index_of
from shm.counters import Cell

TOPIC = b"kv"
MAX_UNREAD_BATCHES = 100_000  # kept for a slow subscriber; it loses the rest
LOOK_INTERVAL_NS = 1_000_000_000


class BlockStored(msgspec.Struct, tag_field="type", tag=True, frozen=True, omit_defaults=True):
    """Blocks that can be reused now, each the parent of the next."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    extra_keys: list[ExtraKeys | None] | None = None  # everything else that their hashes cover


class BlockRemoved(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """Evicted blocks."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """The prefix cache is empty."""


class StateStored(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """States of recurrent layers after these blocks."""

    block_hashes: list[bytes]


class StateRemoved(msgspec.Struct, tag_field="type", tag=True, frozen=True):
    """Evicted states."""

    block_hashes: list[bytes]


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared | StateStored | StateRemoved
IndexChange = BlocksStored | BlocksRemoved | BlocksCleared | StatesStored | StatesRemoved


class KvEventPublisher:
    """Publishes events in batches at `endpoint`, and counts them in `num_events`."""

    def __init__(self, endpoint: str, num_events: Cell) -> None:
        self._endpoint = endpoint
        self._num_events = num_events
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._zmq.socket(zmq.PUB)
        self._sequence = 0
        self._next_look_ns = 0
        self._events: list[KvEvent] = []

    def start(self) -> None:
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_BATCHES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._endpoint)

    def add(self, change: IndexChange) -> None:
        """Add a change of the prefix index to the next batch."""
        match change:
            case BlocksStored(block_hashes, parent_hash, token_ids, block_size, _, extra):
                tokens = array("i", token_ids).tolist()
                extra_keys = [keys or None for keys in extra] or None
                self._events.append(BlockStored(block_hashes, parent_hash or None, tokens, block_size, extra_keys))
            case BlocksRemoved(block_hashes):
                self._events.append(BlockRemoved(block_hashes))
            case BlocksCleared():
                self._events.append(AllBlocksCleared())
            case StatesStored(block_hashes):
                self._events.append(StateStored(block_hashes))
            case StatesRemoved(block_hashes):
                self._events.append(StateRemoved(block_hashes))

    def publish(self) -> int:
        """Publish the batch and return the number of its events. Never blocks: a PUB socket drops messages for a slow
        subscriber, and the gap in the numbers shows it."""
        events, self._events = self._events, []
        if events:
            payload = msgspec.msgpack.encode((time.time(), events))
            self._socket.send_multipart((TOPIC, self._sequence.to_bytes(8, "big"), payload))
            self._sequence += 1
            self._num_events.add(len(events))
        return len(events)

    def keep_socket(self, now_ns: int) -> None:
        """Bind again once a second if the socket's file was removed: later subscribers need it."""
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_INTERVAL_NS
            with contextlib.suppress(OSError):  # its directory is gone: the supervisor reports and restores it
                bind_again(self._socket, self._endpoint)

    def close(self) -> None:
        self.publish()
        self._socket.close()
        self._zmq.term()


def endpoint_of(cache: str, given: str) -> str:
    """Return the endpoint of replica k for the `given` one: the TCP port + k, or the path with k at its end."""
    address, _, port = given.rpartition(":")
    if given.startswith("tcp:") and port.isdecimal():
        return f"{address}:{int(port) + index_of(cache)}"
    return f"{given}.{index_of(cache)}" if cache != CACHE else given

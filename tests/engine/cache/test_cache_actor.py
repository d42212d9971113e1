"""The cache actor on real rings: KV events on its PUB socket, its hello, and the answers to moves."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.cache.actor import CacheActor
from engine.cache.kv_events import endpoint_of
from engine.messages import (
    BlocksCleared,
    BlocksMove,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    Hello,
    Message,
    decode,
    encode,
)
from engine.process.actor import ActorLoop
from engine.process.context import ActorContext
from engine.process.run_directory import Run
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import RingSizes
from shm.counters import State
from shm.mailbox import Mailbox, MailboxSender
from tests.engine.scheduler.simulation import small_config
from tests.waiting import WATCHDOG_S, wait_until

ARENA_BYTES = 1 << 16
NAMES = ("scheduler", "cache")


class Bench:
    """The actor, the scheduler's ends of its rings, and a subscriber."""

    def __init__(self, directory: Path) -> None:
        self.config = small_config(directory, kv_cache_bytes=ARENA_BYTES)
        self.run = Run(self.config.run_id, directory)
        self.segments = RunSegments(self.config.run_id, NAMES, RingSizes(dict.fromkeys(NAMES, 1 << 14), 1 << 14), ARENA_BYTES)
        self.mailbox = Mailbox.attach(self.config.run_id, "scheduler", 1)
        self.sender = MailboxSender.attach(self.config.run_id, "cache", "scheduler", 1)
        self.zmq = zmq.Context()
        self.socket = self.zmq.socket(zmq.SUB)
        self.socket.connect(self.run.kv_events_endpoint())
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.context = ActorContext(self.run, self.config, "cache", self.epoch, os.dup(self.segments.arenas[0].fd))
        self.actor = CacheActor(self.context)
        self.actor.on_start()
        self.loop = ActorLoop(self.actor)

    def stop(self) -> None:
        self.actor.on_stop()
        self.context.close()

    def close(self) -> None:
        self.socket.close(0)
        self.zmq.term()
        self.stop()
        self.mailbox.close()
        self.sender.close()
        self.segments.close()
        unlink_segments(self.config.run_id)

    def tell(self, *messages: Message) -> None:
        for message in messages:
            assert self.sender.try_send(encode(message))
        self.loop.turn()

    def heard(self) -> list[Message]:
        return [decode(payload) for _, payload in self.mailbox.receive()]

    def batch(self) -> tuple[int, list[dict[str, Any]]]:
        """Return number and events of the next batch."""
        assert self.socket.poll(1000 * WATCHDOG_S), "no event came"
        topic, sequence, payload = self.socket.recv_multipart()
        assert topic == b"kv"
        published_at, events = msgspec.msgpack.decode(payload)
        assert published_at > 1.7e9
        return int.from_bytes(sequence, "big"), events

    def wait_for_subscription(self) -> None:
        """Wait until the PUB socket knows its subscriber, which it learns in the background."""

        def is_heard() -> bool:
            self.tell(BlocksCleared())
            return bool(self.socket.poll(20))

        wait_until(is_heard, what="the subscription")
        while self.batch()[0] < self.actor._publisher._sequence - 1:
            pass


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory:
        bench = Bench(Path(directory))
        yield bench
        bench.close()


def stored(keys: list[bytes], parent: bytes, token_ids: list[int]) -> BlocksStored:
    return BlocksStored(keys, parent, array("i", token_ids).tobytes(), 4, list(range(len(keys))))


def test_batches_are_sent_in_order(bench: Bench) -> None:
    bench.wait_for_subscription()
    first = stored([b"a", b"b"], b"", list(range(8)))
    bench.tell(first, stored([b"c"], b"b", [9, 9, 9, 9]), BlocksRemoved([b"c"]), BlocksCleared())
    number, events = bench.batch()
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [b"a", b"b"],
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
        },
        {"type": "BlockStored", "block_hashes": [b"c"], "parent_block_hash": b"b", "token_ids": [9] * 4, "block_size": 4},
        {"type": "BlockRemoved", "block_hashes": [b"c"]},
        {"type": "AllBlocksCleared"},
    ]
    bench.tell(BlocksRemoved([b"a"]))
    assert bench.batch() == (number + 1, [{"type": "BlockRemoved", "block_hashes": [b"a"]}])
    assert bench.loop.turn() == 0


def test_units_of_media_are_named(bench: Bench) -> None:
    """vLLM's `extra_keys`: null for a block, or everything besides tokens that its hash holds."""
    bench.wait_for_subscription()
    message = stored([b"a", b"b"], b"", list(range(8)))
    message.extra_keys = [(), ((b"unit", 3),)]
    bench.tell(message)
    (event,) = bench.batch()[1]
    assert event["extra_keys"] == [None, [[b"unit", 3]]]


def test_counts(bench: Bench) -> None:
    bench.tell(BlocksCleared(), BlocksRemoved([b"a"]))
    assert bench.segments.counters.counter("kv_events_total", "cache").value == 2
    assert bench.segments.counters.counter("kv_arena_bytes", "cache").value == ARENA_BYTES


def test_every_life_sends_hello_and_counts_from_zero(bench: Bench) -> None:
    bench.loop.turn()
    assert bench.heard() == [Hello("cache", 1)]
    bench.stop()
    bench.start()
    bench.loop.turn()
    assert bench.heard() == [Hello("cache", 2)]
    bench.tell(BlocksCleared())
    assert bench.actor._publisher._sequence == 1


def test_moves_are_answered(bench: Bench) -> None:
    bench.loop.turn()
    bench.heard()
    bench.tell(BlocksMove(1, "device", "host", [b"a"], [0]), BlocksMove(2, "disk", "device", [b"a"], [0]))
    bench.tell(BlocksMove(3, "device", "device", [b"a"], [0]))
    answers = bench.heard()
    assert [answer.move_id for answer in answers if isinstance(answer, BlocksMoved)] == [1, 2, 3]
    assert answers == [
        BlocksMoved(1, "unknown tier 'host'; expected 'device'"),
        BlocksMoved(2, "unknown tier 'disk'; expected 'device'"),
        BlocksMoved(3),
    ]


def test_a_full_ring_is_tried_again(bench: Bench) -> None:
    bench.loop.turn()
    num_moves = 2000
    for move_id in range(num_moves):
        bench.tell(BlocksMove(move_id, "device", "device", [], []))
    assert bench.actor.deadline_ns() > 0
    answers: list[Message] = []

    def are_all_here() -> bool:
        answers.extend(bench.heard())
        bench.loop.turn()
        return len(answers) == 1 + num_moves

    wait_until(are_all_here, what="all answers")
    assert answers[1:] == [BlocksMoved(move_id) for move_id in range(num_moves)]
    assert bench.actor.deadline_ns() == 0


def test_removed_socket_is_recreated(bench: Bench) -> None:
    """Later subscribers find it, and earlier ones still receive."""
    bench.wait_for_subscription()
    path = Path(bench.run.kv_events_endpoint().removeprefix("ipc://"))
    path.unlink()

    def is_there() -> bool:
        bench.loop.turn()
        return path.exists()

    wait_until(is_there, what="the socket file")
    early, bench.socket = bench.socket, bench.zmq.socket(zmq.SUB)
    bench.socket.connect(bench.run.kv_events_endpoint())
    bench.socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    bench.wait_for_subscription()
    assert early.poll(1000 * WATCHDOG_S)
    early.close(0)


def test_the_arena_is_reserved_once_the_engine_serves(bench: Bench) -> None:
    reserved = bench.segments.counters.counter("kv_arena_reserved_bytes", "cache")
    bench.loop.turn()
    assert (reserved.value, bench.actor.deadline_ns()) == (0, 0)
    bench.segments.counters.actor("supervisor").set_state(State.READY)

    def is_reserved() -> bool:
        bench.loop.turn()
        return bool(reserved.value == ARENA_BYTES)

    wait_until(is_reserved, what="the arena is reserved")
    assert bench.actor.deadline_ns() == 0


@pytest.mark.parametrize(
    ("cache", "given", "expected"),
    [
        ("cache", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("cache0", "tcp://*:5557", "tcp://*:5557"),
        ("cache2", "tcp://*:5557", "tcp://*:5559"),
        ("cache", "ipc:///tmp/events", "ipc:///tmp/events"),
        ("cache1", "ipc:///tmp/events", "ipc:///tmp/events.1"),
    ],
)
def test_each_replica_has_an_endpoint(cache: str, given: str, expected: str) -> None:
    assert endpoint_of(cache, given) == expected

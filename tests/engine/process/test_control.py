"""Commands through the real control socket of a real engine of small actors."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.errors import ControlError, RequestError
from engine.messages import (
    AbortRequest,
    Command,
    ListActors,
    Pause,
    ReloadWeights,
    Reply,
    ResetPrefixCache,
    RestartActor,
    Shutdown,
    decode_control,
    encode,
)
from engine.process.control import MAX_FRAME_BYTES
from engine.process.control_client import ControlClient
from engine.process.run_directory import WeightsRecord
from tests.engine.echo_engine import EchoEngine, is_clean
from tests.waiting import WATCHDOG_S, wait_until

PLAN = "scheduler=SchedulerStandIn,echo0=EchoActor,ping0=PingActor"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EchoEngine]:
    with EchoEngine(tmp_path, PLAN, restart_limit=2) as running:
        yield running.wait_ready()


def test_actors_are_listed(engine: EchoEngine) -> None:
    reply = engine.control().ask(ListActors(), WATCHDOG_S)
    assert reply.status == 200
    rows = reply.details["actors"]
    assert isinstance(rows, list)
    assert [row["name"] for row in rows] == ["supervisor", "scheduler", "echo0", "ping0"]
    assert [row["pid"] for row in rows] == engine.pids()
    assert all(row["heartbeat_age_s"] is not None for row in rows)


def test_restart_by_command_is_no_crash(engine: EchoEngine) -> None:
    for epoch in (2, 3, 4):  # more often than an actor may die
        reply = engine.control().ask(RestartActor("echo0"), WATCHDOG_S)
        assert (reply.status, reply.details["epoch"]) == (200, epoch)
        assert engine.actor("echo0").epoch == epoch
    engine.wait_for_traffic()
    assert engine.value("actor_restarts_total", "supervisor") == 0


def test_carrier_is_answered_before_its_restart(engine: EchoEngine) -> None:
    epoch = engine.actor("echo0").epoch
    assert engine.control().ask(RestartActor("echo0", "echo0"), WATCHDOG_S).status == 202
    wait_until(lambda: engine.actor("echo0").epoch > epoch, what="echo0 restarted")
    assert engine.control().ask(RestartActor("nobody", "nobody"), WATCHDOG_S).status == 404


def test_a_stopped_actor_is_restarted_by_force(engine: EchoEngine) -> None:
    engine.kill("echo0", signal.SIGSTOP)
    assert engine.control().ask(RestartActor("echo0"), WATCHDOG_S).details["epoch"] == 2


@pytest.mark.parametrize(("actor", "status"), [("nobody", 404), ("supervisor", 400)])
def test_invalid_restarts_are_refused(engine: EchoEngine, actor: str, status: int) -> None:
    assert engine.control().ask(RestartActor(actor), WATCHDOG_S).status == status


def test_commands_reach_the_scheduler(engine: EchoEngine) -> None:
    client = engine.control()
    assert client.ask(AbortRequest("r1"), WATCHDOG_S).message == "aborted r1"
    refused = client.ask(ResetPrefixCache(), WATCHDOG_S)
    assert (refused.status, refused.message) == (400, "scheduler does not support the command ResetPrefixCache")

    async def ask_many() -> list[Reply]:
        return await asyncio.gather(*(client.ask_async(AbortRequest(f"r{index}"), WATCHDOG_S) for index in range(20)))

    assert [reply.message for reply in asyncio.run(ask_many())] == [f"aborted r{index}" for index in range(20)]


@pytest.mark.parametrize(
    "order", [ReloadWeights("/other", ranks=[70] * 300_000), AbortRequest("r" * 30_000), RestartActor("a" * 2_000_000)]
)
def test_too_long_command_is_refused(engine: EchoEngine, order: ReloadWeights | AbortRequest | RestartActor) -> None:
    with pytest.raises(RequestError, match="the limit is 24576"):
        engine.control().ask(order, WATCHDOG_S)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:  # a client that looks at nothing
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(engine.run().control_endpoint)
        frame = encode(Command("0123", order))
        socket.send(frame)
        if len(frame) <= MAX_FRAME_BYTES:  # else the connection ends
            assert socket.poll(int(1000 * WATCHDOG_S))
            reply = decode_control(socket.recv())
            assert isinstance(reply, Reply)
            assert (reply.status, "the limit is 24576" in reply.message) == (400, True)
    assert engine.control().ask(AbortRequest("r1"), WATCHDOG_S).message == "aborted r1"


def test_late_answer_is_delivered(engine: EchoEngine) -> None:
    assert engine.control().ask(ReloadWeights("/other"), WATCHDOG_S).message == "later"
    assert engine.run().weights() == WeightsRecord.of_start(engine.run().manifest().config)


def test_command_of_a_dead_scheduler_gets_503_once(engine: EchoEngine) -> None:
    replies: list[Reply] = []
    engine.kill("scheduler", signal.SIGSTOP)
    asking = threading.Thread(target=lambda: replies.append(engine.control().ask(AbortRequest("lost"), WATCHDOG_S)))
    asking.start()
    counters = engine.counters()
    wait_until(lambda: has_records(engine), what="order on the ring")
    engine.kill("scheduler")
    asking.join(WATCHDOG_S)
    assert replies[0].status == 503
    assert "died" in replies[0].message
    engine.wait_for_epoch("scheduler", 2)
    dropped = counters.counter("messages_dropped_total", "scheduler")
    wait_until(lambda: dropped.value == 1, what="the successor drops the order")
    counters.close()

    def taken() -> Reply | None:
        """Return the answer of the successor, once the supervisor knows that it is ready."""
        reply = engine.control().ask(AbortRequest("next"), WATCHDOG_S)
        return None if reply.status == 503 else reply

    reply = wait_until(taken, what="the successor takes orders")
    assert (reply.message, reply.details) == ("aborted next", {"epoch": 2})


def has_records(engine: EchoEngine) -> bool:
    from shm.inspection import rings

    return any(ring.receiver == "scheduler" and ring.fill_bytes > 0 for ring in rings(engine.run().run_id))


def test_a_client_gives_up_after_its_timeout(engine: EchoEngine) -> None:
    with pytest.raises(ControlError, match=r"did not answer Pause within 0.2 s"):
        engine.control().ask(Pause(), 0.2)


def test_shutdown_exits_with_0_and_refuses_open_requests(engine: EchoEngine) -> None:
    run = engine.run()
    replies: list[Reply] = []
    asking = threading.Thread(target=lambda: replies.append(ControlClient(run).ask(Pause(), WATCHDOG_S)))
    asking.start()
    wait_until(lambda: engine.value("messages_received_total", "scheduler") == 1, what="the order is with the scheduler")
    assert ControlClient(run).ask(Shutdown(), WATCHDOG_S).status == 200
    asking.join(WATCHDOG_S)
    assert replies[0].status == 503
    assert engine.wait_exit() == 0
    assert is_clean(run)
    with pytest.raises(ControlError, match="is not running"):
        ControlClient(run).ask(ListActors(), WATCHDOG_S)


def test_a_client_notices_that_the_engine_dies(engine: EchoEngine) -> None:
    client = engine.control()
    died: list[str] = []

    def ask() -> None:
        try:
            client.ask(Pause(), WATCHDOG_S)
        except ControlError as error:
            died.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: engine.value("messages_received_total", "scheduler") == 1, what="the order is with the scheduler")
    os.kill(engine.process.pid, signal.SIGKILL)
    asking.join(WATCHDOG_S)
    assert "is not running" in died[0]


def test_garbage_is_answered_with_400(engine: EchoEngine) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(engine.run().control_endpoint)
        for frames in ([b""], [b"\x00garbage"], [b"", b"\x93\x01\x02\x03"], [b"\xc1" * 1000]):
            socket.send_multipart(frames)
            assert socket.poll(1000 * WATCHDOG_S)
            reply = decode_control(socket.recv())
            assert isinstance(reply, Reply)
            assert reply.status == 400
    assert engine.control().ask(ListActors(), WATCHDOG_S).status == 200

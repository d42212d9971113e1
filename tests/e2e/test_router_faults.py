"""A router and two engines with a relay between them, which is the network: it is cut, slow, or breaks connections within a
frame. Two processes die at once, the list changes meanwhile, and peers are hostile. Every stream has the bytes that it would
have had.

`tools/test-cluster` runs the same for hours, and with namespaces in place of the relay.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.cluster.frames import MAX_REQUEST_BYTES, Drop, Forward, Results, Welcome
from engine.cluster.key import read_key_file
from engine.messages import Abort
from tests.e2e.engine_process import OPERATOR
from tests.e2e.kinds import Json, ask_all, every_kind
from tests.e2e.relay import DOWN, UP, Relay
from tests.e2e.router_process import Cluster
from tests.e2e.test_router import BODIES, MODEL, OPTIONS, Deltas, Peer, check, disturbed, request
from tests.e2e.workload import Answer, answers, stream_all
from tests.waiting import WATCHDOG_S, wait_until

BOTH = ((-1, "tokenizer0"), (0, "scheduler")), ((0, "worker0"), (1, "link"))


class RelayedCluster(Cluster):
    """The router reaches its engines through `relay`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, MODEL, *OPTIONS)
        self.relay = Relay(self.addresses)
        self.router.write(self.relay.addresses)

    def close(self) -> None:
        super().close()
        self.relay.close()

    def settle(self) -> None:
        """Wait until both engines are ready and hold nothing."""
        self.wait_for(2)
        wait_until(self.is_idle, what="the engines hold nothing")

    def epochs(self) -> dict[str, Any]:
        return {name: row["epoch"] for name, row in self.engines[0].actors().items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayedCluster]:
    with RelayedCluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(cluster: RelayedCluster) -> list[Answer]:
    return answers(cluster.engines[0], BODIES)


# ------------------------------------------------------------------------------------------------------------ the network


@pytest.mark.parametrize("cut", [(UP, DOWN), (UP,)], ids="+".join)
def test_streams_survive_a_partition(cluster: RelayedCluster, undisturbed: list[Answer], cut: tuple[str, ...]) -> None:
    """Connections stay open and nothing passes, in both directions or in one. Both sides live on; later the cut ends, and what
    was on its way arrives."""

    async def part(deltas: Deltas) -> None:
        await deltas.flow()
        cluster.relay.tell(0, cut=cut)
        await asyncio.to_thread(cluster.wait_until_gone)
        cluster.relay.tell(0, cut=[])

    check(disturbed(cluster, part), undisturbed)
    cluster.settle()


def test_streams_pass_a_slow_network(cluster: RelayedCluster, undisturbed: list[Answer]) -> None:
    """1 Mbit/s in each direction, and nothing is submitted again."""
    before = cluster.router.metric("resubmissions_total")
    for engine in (0, 1):
        cluster.relay.tell(engine, bytes_per_s=125_000)
    check(answers(cluster.router, BODIES), undisturbed)
    for engine in (0, 1):
        cluster.relay.tell(engine, bytes_per_s=0)
    assert cluster.router.metric("resubmissions_total") == before
    cluster.settle()


def test_streams_survive_connections_that_break(cluster: RelayedCluster, undisturbed: list[Answer]) -> None:
    """Bytes come late and in pieces of any size, and connections end in the middle of a frame."""
    rng = random.Random(5)

    async def break_them(deltas: Deltas) -> None:
        for engine in (0, 1):
            cluster.relay.tell(engine, seed=rng.randrange(1, 1 << 30), pause_s=0.005)
        for engine in (0, 1, 0):
            await deltas.flow()
            cluster.relay.tell(engine, break_after=rng.randrange(1, 3000))

    check(disturbed(cluster, break_them), undisturbed)
    for engine in (0, 1):
        cluster.relay.tell(engine, seed=0, break_after=0)
    cluster.settle()


# ---------------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("victims", BOTH, ids=str)
def test_streams_survive_two_deaths_at_once(
    cluster: RelayedCluster, undisturbed: list[Answer], victims: tuple[tuple[int, str], ...]
) -> None:
    async def kill(deltas: Deltas) -> None:
        await deltas.flow()
        await asyncio.gather(*(cluster.kill(index, actor) for index, actor in victims))

    check(disturbed(cluster, kill), undisturbed)
    cluster.settle()


def test_streams_survive_a_hang_and_a_death(cluster: RelayedCluster, undisturbed: list[Answer]) -> None:
    """The link of one engine stops, and the rank of the other one dies: for a while no engine answers."""

    async def disturb(deltas: Deltas) -> None:
        await deltas.flow()
        await asyncio.to_thread(cluster.engines[0].kill, "link", signal.SIGSTOP)
        cluster.engines[1].kill("worker0")
        await asyncio.to_thread(cluster.wait_until_gone)
        await asyncio.to_thread(cluster.engines[0].kill, "link", signal.SIGCONT)

    check(disturbed(cluster, disturb), undisturbed)
    cluster.settle()


def test_every_kind_survives_deaths(cluster: RelayedCluster) -> None:
    """Structured output, n, tools, log-probabilities: a scheduler dies while prompts are computed, and a tokenizer later."""
    calls = every_kind(48)

    def reset() -> None:
        for engine in cluster.engines:
            httpx.post(f"{engine.url}/admin/reset_prefix_cache", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()

    async def ask_and_kill() -> list[Json]:
        num = 0

        def note() -> None:
            nonlocal num
            num += 1

        asking = asyncio.create_task(ask_all(cluster.router.url, calls, note))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: cluster.router.metric("open_requests") > 0, what="requests are open")
        await cluster.kill(1, "scheduler")
        await asyncio.to_thread(wait_until, lambda: num > 20 or asking.done(), what="answers have begun")
        await cluster.kill(-1, "tokenizer0")
        return await asking

    reset()
    expected = asyncio.run(ask_all(cluster.engines[0].url, calls))
    reset()
    for call, answer, wanted in zip(calls, asyncio.run(ask_and_kill()), expected, strict=True):
        for each in (answer, wanted):  # a later attempt may find its own prompt
            forget_cached_tokens(each)
        assert answer == wanted, call
    cluster.settle()


def forget_cached_tokens(value: Any) -> None:
    """Remove the numbers of cached tokens from an answer, and of those that were not (Anthropic's `input_tokens`)."""
    if isinstance(value, dict):
        for key in [key for key in value if "cache" in str(key)]:
            del value[key]
            value.pop("input_tokens", None)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        forget_cached_tokens(each)


def test_streams_survive_a_list_that_changes(cluster: RelayedCluster, undisturbed: list[Answer]) -> None:
    """Engines leave and come back while streams flow, and one that leaves loses its rank."""
    first, second = cluster.relay.addresses

    async def change(deltas: Deltas) -> None:
        await deltas.flow()
        cluster.router.write([second])
        await asyncio.to_thread(cluster.wait_for, 1)
        cluster.engines[0].kill("worker0")
        cluster.router.write([second, first])
        await deltas.flow()
        cluster.router.write([first])
        await asyncio.to_thread(cluster.wait_for, 1)
        cluster.router.write([first, second])

    check(disturbed(cluster, change), undisturbed)
    cluster.settle()


def test_paused_engine_gets_nothing_new(cluster: RelayedCluster, undisturbed: list[Answer]) -> None:
    """Pause an engine, as before its machine is stopped: its streams end there, and new ones go to the other engine."""
    before = cluster.router.metric("resubmissions_total")
    url = cluster.engines[0].url

    async def pause(deltas: Deltas) -> None:
        await deltas.flow()
        async with httpx.AsyncClient(headers=OPERATOR, timeout=WATCHDOG_S) as client:
            paused = asyncio.create_task(client.post(f"{url}/admin/pause", json={"mode": "wait"}))
            await asyncio.to_thread(cluster.wait_for, 1)
            check(await stream_all(cluster.router.url, BODIES[:2], 2), undisturbed[:2])
            (await paused).raise_for_status()

    check(disturbed(cluster, pause), undisturbed)
    httpx.post(f"{url}/admin/resume", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    assert cluster.router.metric("resubmissions_total") == before
    cluster.settle()


# ---------------------------------------------------------------------------------------------------------- hostile peers


def test_slow_reader_costs_its_own_session(cluster: RelayedCluster) -> None:
    """A peer asks for much and reads nothing: its session ends, and others notice nothing."""
    engine, before = cluster.engines[0], cluster.epochs()
    num_ended = engine.metric("link_sessions_ended_total")
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        sampling = {"ignore_eos": True, "max_tokens": 1000, "num_logprobs": 20}
        for index in range(64):  # a frame for each tokenizer and step
            peer.say(Forward(0, request(f"r{index}", f"tokenizer{index}", sampling=dict(sampling))))
        wait_until(lambda: engine.metric("link_sessions_ended_total") > num_ended, what="its session has ended")
        check(answers(cluster.router, BODIES[:2]), answers(cluster.engines[1], BODIES[:2]))
    assert cluster.epochs() == before
    cluster.settle()


def test_many_connections_cost_nothing(cluster: RelayedCluster) -> None:
    """Connections that say nothing, or no frames, while a stream flows; afterwards no descriptor is left."""
    host, _, port = cluster.addresses[0].rpartition(":")
    pid, before = cluster.engines[0].actors()["link"]["pid"], cluster.epochs()

    def num_descriptors() -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    num_before, rng = num_descriptors(), random.Random(3)

    async def knock(deltas: Deltas) -> None:
        for index in range(400):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(rng.randbytes(rng.randrange(100)) if index % 2 else b"")
            writer.close()
            await asyncio.sleep(0.001)

    found = disturbed(cluster, knock)
    check(found, answers(cluster.engines[1], BODIES))
    wait_until(lambda: num_descriptors() <= num_before, what="descriptors are closed")
    assert cluster.epochs() == before
    cluster.settle()


def test_announced_lengths_take_no_memory(cluster: RelayedCluster) -> None:
    """1 GB is announced before the handshake, and 17 MB are sent after it: the connection is closed."""
    host, _, port = cluster.addresses[0].rpartition(":")
    pid, before = cluster.engines[0].actors()["link"]["pid"], cluster.epochs()

    def peak_kib() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])

    peak_before = peak_kib()
    with socket.create_connection((host, int(port)), timeout=WATCHDOG_S) as raw:
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1, RFC 37
        raw.sendall(greeting + b"\x06" + struct.pack(">Q", 1 << 30) + b"\x05HELLO")
        while raw.recv(4096):
            pass
    assert peak_kib() < peak_before + (8 << 10)
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        assert isinstance(peer.hear(), Welcome)
        peer.socket.send(bytes(MAX_REQUEST_BYTES + 1))
        wait_until(lambda: cluster.engines[0].metric("link_peers") == 1, what="its session has ended")
    assert cluster.epochs() == before
    cluster.settle()


def test_many_request_ids_are_forgotten(cluster: RelayedCluster) -> None:
    """Thousands of ids that no request has: nothing is kept of them, and the next request is answered."""
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        for index in range(10_000):
            peer.say(Drop(0, Abort(f"no request {index}", 0)))
        peer.say(Forward(0, request()))
        bodies = iter(peer.hear, None)
        assert any(output.finish_reason for body in bodies if isinstance(body, Results) for output in body.outputs)
    cluster.settle()

"""A router and its engines under faults drawn by a seed, until a number of streams have ended: 0 of them may differ from those
of an engine at its own address. Nightly: `tools/test-cluster [STREAMS] [SEED]`.

A round has sixteen streams, or requests of every kind with structured output and n, and one or two faults in the middle: an
actor or an engine dies, a link hangs, the network is cut, slow or breaks connections, the list changes. Besides: the key is
rotated, and peers send a million ids and connect every millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from engine.cluster.frames import Drop, Forward, Results
from engine.cluster.key import make_key_file, read_key_file
from engine.messages import Abort
from tests.e2e.engine_process import EngineProcess
from tests.e2e.kinds import Json, ask_all, every_kind
from tests.e2e.relay import DOWN, UP
from tests.e2e.router_process import RouterProcess
from tests.e2e.test_router import BODIES, Deltas, Peer, check, content, request
from tests.e2e.test_router_faults import RelayedCluster, forget_cached_tokens
from tests.e2e.workload import Answer, answers, mixed_bodies, stream_all
from tests.waiting import wait_until

MANY = mixed_bodies(64, seed=23, max_tokens=700, max_prompt=300)
PER_ROUND = 16
_NO_PROCESS = 1 << 30  # above all pids
ACTORS = ((-1, "tokenizer0"), (-1, "link"), *((k, name) for k in (0, 1) for name in ("link", "scheduler", "worker0", "cache")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayedCluster]:
    with RelayedCluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


# ----------------------------------------------------------------------------------------------------------------- faults


async def kill_actor(cluster: RelayedCluster, rng: random.Random) -> None:
    index, actor = rng.choice(ACTORS)
    await asyncio.to_thread(_signal, cluster.engines[index] if index >= 0 else cluster.router, actor, signal.SIGKILL)


def _signal(victim: EngineProcess, actor: str, number: int) -> int:
    """Send a signal to an actor, if it lives, and return its pid; another fault may have ended it, or its whole engine."""
    with contextlib.suppress(httpx.HTTPError, KeyError, ProcessLookupError):
        pid = int(victim.actors()[actor]["pid"])
        os.kill(pid, number)
        return pid
    return _NO_PROCESS


async def kill_engine(cluster: RelayedCluster, rng: random.Random) -> None:
    index = rng.randrange(2)
    os.kill(cluster.engines[index].pid, signal.SIGKILL)
    await asyncio.to_thread(cluster.start_again, index)


async def kill_both_engines(cluster: RelayedCluster, rng: random.Random) -> None:
    for engine in cluster.engines:
        os.kill(engine.pid, signal.SIGKILL)
    for index in (0, 1):
        await asyncio.to_thread(cluster.start_again, index)


async def hang_link(cluster: RelayedCluster, rng: random.Random) -> None:
    pid = await asyncio.to_thread(_signal, cluster.engines[rng.randrange(2)], "link", signal.SIGSTOP)
    await asyncio.sleep(rng.random() * 6)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def cut(cluster: RelayedCluster, rng: random.Random) -> None:
    index = rng.randrange(2)
    cluster.relay.tell(index, cut=rng.choice([[UP, DOWN], [UP], [DOWN]]))
    await asyncio.sleep(rng.random() * 7)
    cluster.relay.tell(index, cut=[])


async def slow(cluster: RelayedCluster, rng: random.Random) -> None:
    index = rng.randrange(2)
    cluster.relay.tell(index, bytes_per_s=rng.choice([30_000, 125_000]), seed=rng.randrange(1, 99), pause_s=0.02)
    await asyncio.sleep(rng.random() * 3)
    cluster.relay.tell(index, bytes_per_s=0, seed=0)


async def break_connection(cluster: RelayedCluster, rng: random.Random) -> None:
    cluster.relay.tell(rng.randrange(2), break_after=rng.randrange(1, 5000))


async def change_list(cluster: RelayedCluster, rng: random.Random) -> None:
    for _ in range(3):
        cluster.router.write([rng.choice(cluster.relay.addresses)])
        await asyncio.sleep(rng.random())
        cluster.router.write(rng.sample(cluster.relay.addresses, 2))
        await asyncio.sleep(rng.random())


FAULTS: tuple[Callable[[RelayedCluster, random.Random], Awaitable[None]], ...] = (
    *(kill_actor,) * 4,
    kill_engine,
    kill_both_engines,
    hang_link,
    *(cut,) * 2,
    slow,
    *(break_connection,) * 2,
    change_list,
)


async def disturb(cluster: RelayedCluster, rng: random.Random, faults: list[str]) -> None:
    await asyncio.sleep(rng.random() * rng.choice([0.05, 1.5]))  # before the first token, or while answers are computed
    chosen = rng.sample(FAULTS, rng.choice([1, 1, 2]))
    if kill_engine in chosen and kill_both_engines in chosen:
        chosen = [kill_both_engines]
    faults += [fault.__name__ for fault in chosen]
    await asyncio.gather(*(fault(cluster, rng) for fault in chosen))


def settle(cluster: RelayedCluster) -> None:
    for index in (0, 1):
        cluster.relay.tell(index, cut=[], bytes_per_s=0, seed=0, break_after=0)
    cluster.router.write(cluster.relay.addresses)
    wait_until(lambda: all(engine.is_ready for engine in cluster.engines), what="the engines have said their addresses")
    cluster.settle()


# ----------------------------------------------------------------------------------------------------------------- the run


@pytest.mark.timeout(4 * 3600)
def test_no_stream_differs(cluster: RelayedCluster, request: pytest.FixtureRequest) -> None:
    num_wanted, seed = int(request.config.getoption("--streams")), int(request.config.getoption("--seed"))
    expected = answers(cluster.engines[0], MANY)
    calls = every_kind(48)
    expected_calls = asyncio.run(ask_all(cluster.engines[0].url, calls))
    for each in expected_calls:
        forget_cached_tokens(each)
    rng = random.Random(seed)
    num_done = num_different = number = 0
    begin_s = time.monotonic()
    while num_done < num_wanted:
        number += 1
        own, faults = random.Random(rng.randrange(1 << 60)), []
        if number % 4:
            indices = own.sample(range(len(MANY)), PER_ROUND)
            found = asyncio.run(_streams(cluster, own, [MANY[index] for index in indices], faults))
            pairs = [(answer, expected[index]) for answer, index in zip(found, indices, strict=True)]
            different = sum(bool(answer.error) or content(answer) != content(wanted) for answer, wanted in pairs)
            num_done += len(indices)
        else:
            answered = asyncio.run(_kinds(cluster, own, calls, faults))
            different = sum(answer != wanted for answer, wanted in zip(answered, expected_calls, strict=True))
            num_done += len(calls)
        num_different += different
        print(f"round {number}: {', '.join(faults)}: {different} differ; {num_done} streams", flush=True)
        settle(cluster)
    print(f"{num_different} of {num_done} streams differ (seed {seed}, {time.monotonic() - begin_s:.0f} s)", flush=True)
    assert num_different == 0


async def _streams(
    cluster: RelayedCluster, rng: random.Random, bodies: list[dict[str, object]], faults: list[str]
) -> list[Answer]:
    streams = asyncio.create_task(stream_all(cluster.router.url, bodies, len(bodies)))
    await disturb(cluster, rng, faults)
    return await streams


async def _kinds(cluster: RelayedCluster, rng: random.Random, calls: list[object], faults: list[str]) -> list[Json]:
    asking = asyncio.create_task(ask_all(cluster.router.url, calls))  # type: ignore[arg-type]
    await disturb(cluster, rng, faults)
    found = await asking
    for each in found:
        forget_cached_tokens(each)
    return found


def test_key_is_rotated(cluster: RelayedCluster, tmp_path: Path) -> None:
    """Engine by engine, with a second router that has the new key: streams of the first router continue as long as an engine
    with the old key is there."""
    new_key = tmp_path / "new.key"
    make_key_file(new_key)
    undisturbed = answers(cluster.engines[0], BODIES)
    second = RouterProcess(tmp_path, [cluster.addresses[1]], "--cluster-key-file", str(new_key))
    old_key = cluster.key

    async def rotate() -> list[Answer]:
        deltas = Deltas()
        streams = asyncio.create_task(stream_all(cluster.router.url, BODIES, len(BODIES), deltas.note))
        await deltas.flow()
        os.kill(cluster.engines[1].pid, signal.SIGTERM)
        await asyncio.to_thread(cluster.engines[1].wait_for_exit)
        cluster.key = new_key
        cluster.engines[1] = cluster.engine(cluster.addresses[1])
        await asyncio.to_thread(cluster.engines[1].start)
        await asyncio.to_thread(second.start)
        return await streams

    try:
        check(asyncio.run(rotate()), undisturbed)
        check(answers(second, BODIES), undisturbed)
        assert cluster.states().count("ready") == 1
    finally:
        second.close()
        cluster.engines[1].close()
        cluster.key = old_key
        cluster.engines[1] = cluster.engine(cluster.addresses[1])
        cluster.engines[1].start()
    cluster.settle()


@pytest.mark.timeout(3600)
def test_a_million_ids_take_no_memory(cluster: RelayedCluster) -> None:
    engine = cluster.engines[0]
    pids = {name: int(row["pid"]) for name, row in engine.actors().items() if name in ("link", "scheduler")}

    def resident_kib() -> dict[str, int]:
        return {
            name: int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) for name, pid in pids.items()
        }

    before = resident_kib()
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        for index in range(1_000_000):
            peer.say(Drop(0, Abort(f"no request {index}", 0)))
        peer.say(Forward(0, request()))
        bodies = iter(peer.hear, None)
        assert any(output.finish_reason for body in bodies if isinstance(body, Results) for output in body.outputs)
    after = resident_kib()
    print({name: f"{before[name]} -> {after[name]} KiB" for name in pids})
    assert all(after[name] < before[name] + (32 << 10) for name in pids)
    cluster.settle()


def test_a_connection_every_millisecond(cluster: RelayedCluster) -> None:
    """For ten seconds, while streams flow."""
    host, _, port = cluster.addresses[0].rpartition(":")
    undisturbed = answers(cluster.engines[1], BODIES)

    async def knock() -> list[list[Answer]]:
        end_s, found = time.monotonic() + 10, []
        open_: list[asyncio.StreamWriter] = []

        async def stream() -> None:
            while time.monotonic() < end_s:
                found.append(await stream_all(cluster.router.url, BODIES, len(BODIES)))

        streams = asyncio.create_task(stream())
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                open_.append((await asyncio.open_connection(host, int(port)))[1])
            if len(open_) > 500:
                open_.pop(0).close()
            await asyncio.sleep(0.001)
        await streams
        for writer in open_:
            writer.close()
        return found

    for each in asyncio.run(knock()):
        check(each, undisturbed)
    cluster.settle()

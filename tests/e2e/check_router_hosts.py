"""A router and engines on hosts of their own: network namespaces with veth pairs. The network is cut in both directions or in
one and limited to 1 Mbit/s by the kernel, and the clock of one host is a year ahead. Nightly: `tools/test-cluster`.

Needs root, or a user namespace, which `tools/test-cluster` makes where it may.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engine_process import EngineProcess
from tests.e2e.router_process import Cluster
from tests.e2e.test_router import BODIES, MODEL, OPTIONS, Deltas, check, disturbed
from tests.e2e.workload import Answer, answers
from tests.waiting import wait_until

YEAR_S = 365 * 24 * 3600
TO_ENGINE, TO_ROUTER = "to the engine", "to the router"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Host:
    """Namespace with an address that the tests and the router reach through a veth pair."""

    def __init__(self, number: int) -> None:
        self.name, self.outer, self.inner = f"tokamak{os.getpid()}-{number}", f"vo{number}", f"vi{number}"
        self.address = f"10.77.{number}.2"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.outer, "type", "veth", "peer", "name", self.inner, "netns", self.name)
        run("ip", "address", "add", f"10.77.{number}.1/30", "dev", self.outer)
        run("ip", "link", "set", self.outer, "up")
        self.inside("ip", "address", "add", f"{self.address}/30", "dev", self.inner)
        for device in (self.inner, "lo"):
            self.inside("ip", "link", "set", device, "up")

    def inside(self, *command: str) -> None:
        run("ip", "netns", "exec", self.name, *command)

    def queue(self, direction: str, *discipline: str) -> None:
        """Set the kernel's queueing discipline for packets in one direction."""
        if direction == TO_ENGINE:
            run("tc", "qdisc", "replace", "dev", self.outer, "root", *discipline)
        else:
            self.inside("tc", "qdisc", "replace", "dev", self.inner, "root", *discipline)

    def remove(self) -> None:
        run("ip", "netns", "delete", self.name)  # and with it the veth pair


class HostedCluster(Cluster):
    """Each engine is on a host of its own; the second one's monotonic clock is a year ahead."""

    def __init__(self, directory: Path, hosts: list[Host]) -> None:
        self.hosts = hosts
        super().__init__(directory, MODEL, *OPTIONS)
        self.addresses = [f"{host.address}:9100" for host in hosts]
        self.engines = [self.on(host, number) for number, host in enumerate(hosts)]
        self.router.write(self.addresses)

    def on(self, host: Host, number: int) -> EngineProcess:
        engine = self.engine(self.addresses[number], "--host", host.address)
        clock = ["unshare", "--time", f"--monotonic={YEAR_S}", "--kill-child", "--fork"] if number else []
        engine.command = ["ip", "netns", "exec", host.name, *clock, *engine.command]
        return engine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    hosts: list[Host] = []
    try:
        hosts += [Host(number) for number in (1, 2)]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(
            f"no network namespaces can be made: {error}; the relay stands for the network (a cluster on several hosts)"
        )
    with HostedCluster(tmp_path_factory.mktemp("cluster"), hosts) as found:
        yield found
        for host in hosts:
            host.remove()


@pytest.fixture(scope="module")
def undisturbed(cluster: HostedCluster) -> list[Answer]:
    return answers(cluster.engines[0], BODIES)


def settle(cluster: HostedCluster) -> None:
    cluster.wait_for(2)
    wait_until(cluster.is_idle, what="the engines hold nothing")


def test_clocks_a_year_apart(cluster: HostedCluster, undisturbed: list[Answer]) -> None:
    check(answers(cluster.engines[1], BODIES), undisturbed)
    check(answers(cluster.router, [{**body, "timeout": 600} for body in BODIES]), undisturbed)
    settle(cluster)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("directions", [(TO_ENGINE, TO_ROUTER), (TO_ENGINE,), (TO_ROUTER,)], ids=" and ".join)
def test_streams_survive_a_cut(
    cluster: HostedCluster, undisturbed: list[Answer], directions: tuple[str, ...], victim: int
) -> None:
    host = cluster.hosts[victim]

    async def cut(deltas: Deltas) -> None:
        await deltas.flow()
        for direction in directions:
            host.queue(direction, "blackhole")
        await asyncio.to_thread(cluster.wait_until_gone)
        for direction in directions:
            host.queue(direction, "pfifo")

    check(disturbed(cluster, cut), undisturbed)
    settle(cluster)


def test_streams_pass_a_megabit_per_second(cluster: HostedCluster, undisturbed: list[Answer]) -> None:
    before = cluster.router.metric("resubmissions_total")
    pairs = [(host, direction) for host in cluster.hosts for direction in (TO_ENGINE, TO_ROUTER)]
    for host, direction in pairs:
        host.queue(direction, "tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")
    check(answers(cluster.router, BODIES), undisturbed)
    for host, direction in pairs:
        host.queue(direction, "pfifo")
    assert cluster.router.metric("resubmissions_total") == before
    settle(cluster)


def test_streams_survive_the_end_of_a_host(cluster: HostedCluster, undisturbed: list[Answer]) -> None:
    """Its network is cut first, so that nothing says goodbye, and then all of its processes are killed."""

    async def end(deltas: Deltas) -> None:
        await deltas.flow()
        for direction in (TO_ENGINE, TO_ROUTER):
            cluster.hosts[0].queue(direction, "blackhole")
        cluster.engines[0].close()
        await asyncio.to_thread(cluster.wait_until_gone)
        for direction in (TO_ENGINE, TO_ROUTER):
            cluster.hosts[0].queue(direction, "pfifo")
        cluster.engines[0] = cluster.on(cluster.hosts[0], 0)
        await asyncio.to_thread(cluster.engines[0].start)

    check(disturbed(cluster, end), undisturbed)
    settle(cluster)

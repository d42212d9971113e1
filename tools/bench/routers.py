"""Routers beside each other, with engines on this machine: `python -m tools.bench.routers [--part PART]...`.

Routers of three policies (prefix, round-robin, load) share four engines and get the same prompts in interleaved rounds, each
with empty prefix caches; medians and ratios are printed.

    prefixes     48 beginnings of 768 tokens, 4 prompts each, in random order; an engine holds 60 % of the beginnings
    one prefix   one beginning for as many prompts
    two routers  the prompts of `prefixes`, through one router and in turn through two
    choice       time to choose among 32 replicas for a prompt of 4096 tokens, cached nowhere and everywhere; no engine needed
    idle         readiness, memory and processor time of a router, and of the link of an engine
    silence      longest pause of a stream when all processes of an engine are stopped, and when they are killed, beside the
                 time to compute its prompt and answer again, alone

The model is small, with random weights; every process runs on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from engine.cluster.key import make_key_file
from engine.messages import ResetPrefixCache
from engine.observation.observer import Observer
from engine.process.control_client import ControlClient
from engine.process.run_directory import open_run
from tokamak.launched import COMMAND
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess, free_port, processor_s, pss_bytes
from tools.bench.replicas import BLOCK_SIZE, CONFIG, HELD_SHARE, OUTPUT_LEN, OWN_LEN, PREFIX_LEN, VOCABULARY, make_requests
from tools.bench.router_choice import show_choice
from tools.bench.serve import Load
from tools.bench.streams import Stream
from tools.target import Target

NUM_ENGINES = 4
NUM_PREFIXES, PROMPTS_PER_PREFIX = 48, 4
POLICIES = ("prefix", "round-robin", "load")
PARTS = ("prefixes", "one prefix", "two routers", "choice", "idle", "silence")
NUM_STREAMS, STREAM_LEN = 8, 400
_TIMEOUT_S = 600.0


class Round(NamedTuple):
    """One policy's answers to the prompts."""

    hit_rate: float
    tokens_per_s: float
    busiest: float  # engine, in prompt tokens, divided by the mean


class Process:
    """An engine or a router."""

    def __init__(self, name: str, command: str, directory: Path) -> None:
        run_directory = directory / name
        full = f"{shlex.join(COMMAND)} {command} --run-dir {run_directory} --port {{port}}"
        self.server = ServerProcess(name, full, directory / f"{name}.log", timeout_s=300)
        self.run = open_run(run_directory)
        self.client = Client(Target.parse(self.server.url), _TIMEOUT_S)

    def counters(self) -> dict[str, float]:
        with contextlib.closing(Observer(self.run)) as observer:
            rows = observer.snapshot().rows
        return {name: sum(row.value for row in rows if row.name == name) for name in {row.name for row in rows}}

    def pids(self) -> dict[str, int]:
        with contextlib.closing(Observer(self.run)) as observer:
            return {actor.name: actor.pid for actor in observer.snapshot().actors}

    def close(self) -> None:
        self.client.close()
        self.server.stop()


class Cluster:
    """Four engines and a router of each policy."""

    def __init__(self, directory: Path, policies: Sequence[str], concurrency: int) -> None:
        self._directory = directory
        self._open = contextlib.ExitStack()
        self._key = directory / "cluster.key"
        self._list = directory / "engines.txt"
        make_key_file(self._key)
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in range(NUM_ENGINES)]
        self._list.write_text("\n".join(self._addresses))
        (model := directory / "model").mkdir()
        (model / "config.json").write_bytes(orjson.dumps(CONFIG))
        num_blocks = int(HELD_SHARE * NUM_PREFIXES * PREFIX_LEN / BLOCK_SIZE)
        options = f"--load-format dummy --no-weight-cache --threads 1 --block-size {BLOCK_SIZE} --num-kv-blocks {num_blocks}"
        options += f" --max-num-seqs {concurrency} --max-model-len 1024 --cluster-key-file {self._key} --model {model}"
        self._engine_options = options
        self.engines = [
            self.add(f"engine{i}", f"serve {options} --cluster-listen {each}") for i, each in enumerate(self._addresses)
        ]
        self.routers = {policy: self.router(policy, policy) for policy in policies}

    def router(self, name: str, policy: str) -> Process:
        command = f"router --engines {self._list} --cluster-key-file {self._key} --data-parallel-routing {policy}"
        found = self.add(f"router-{name}", command)
        deadline_s = time.monotonic() + 60
        while found.counters()["router_engines"] < NUM_ENGINES or _num_ready(found) < NUM_ENGINES:
            assert time.monotonic() < deadline_s, "the engines are not ready"
            time.sleep(0.05)
        return found

    def spare(self, name: str) -> Process:
        """Start a further engine, to be killed, in the place of those before it on the list of all routers."""
        address = f"127.0.0.1:{free_port()}"
        found = self.add(name, f"serve {self._engine_options} --cluster-listen {address}")
        unfinished = self._list.with_suffix(".new")
        unfinished.write_text("\n".join([*self._addresses, address]))
        unfinished.replace(self._list)
        deadline_s = time.monotonic() + 60
        while _num_ready(self.routers["prefix"]) <= NUM_ENGINES:
            assert time.monotonic() < deadline_s, "the further engine is not ready"
            time.sleep(0.05)
        return found

    def add(self, name: str, command: str) -> Process:
        found = Process(name, command, self._directory)
        self._open.callback(found.close)
        return found

    async def round(self, routers: Sequence[Process], requests: Sequence[bytes], concurrency: int) -> Round:
        """Send the requests, in turn to each router, with empty prefix caches."""
        for engine in self.engines:
            ControlClient(engine.run).ask(ResetPrefixCache())
        await asyncio.sleep(0.2)  # until the routers know
        before = [engine.counters() for engine in self.engines]
        parts = [requests[index :: len(routers)] for index in range(len(routers))]
        loads = [
            Load(router.client, "/v1/completions", part, lambda: None) for router, part in zip(routers, parts, strict=True)
        ]
        begin_s = time.perf_counter()
        await asyncio.gather(*(load.in_waves(concurrency // len(routers)) for load in loads))
        wall_s = time.perf_counter() - begin_s
        failed = [timeline for load in loads for timeline in load.timelines if timeline.error]
        assert not failed, f"{failed[0].error}: {failed[0].detail}"
        after = [engine.counters() for engine in self.engines]

        def grown(name: str) -> list[float]:
            return [new[name] - old[name] for new, old in zip(after, before, strict=True)]

        queries = grown("prefix_cache_queries_total")
        num_tokens = len(requests) * (PREFIX_LEN + OWN_LEN + OUTPUT_LEN)
        busiest = max(queries) / statistics.mean(queries)
        return Round(sum(grown("prefix_cache_hits_total")) / sum(queries), num_tokens / wall_s, busiest)

    def close(self) -> None:
        self._open.close()


def _num_ready(router: Process) -> int:
    return sum(engine.state == "ready" for engine in router.run.engines())


# ------------------------------------------------------------------------------------------------------------- the parts


async def compare_policies(cluster: Cluster, num_prefixes: int, options: argparse.Namespace) -> None:
    rounds: dict[str, list[Round]] = {policy: [] for policy in POLICIES}
    for number in range(options.rounds):
        requests = make_requests(num_prefixes, NUM_PREFIXES * PROMPTS_PER_PREFIX, seed=number)
        for policy in (*POLICIES[number % 3 :], *POLICIES[: number % 3]):
            rounds[policy].append(await cluster.round([cluster.routers[policy]], requests, options.concurrency))
    medians = {policy: Round(*map(statistics.median, zip(*each, strict=True))) for policy, each in rounds.items()}
    print(f"\n{f'prefixes: {num_prefixes}':<24}{'cached':>10}{'tokens/s':>10}{'busiest / mean':>16}")
    for policy, found in medians.items():
        print(f"{policy:<24}{found.hit_rate:>10.1%}{found.tokens_per_s:>10.0f}{found.busiest:>16.2f}")
    ours = medians["prefix"]
    for policy in POLICIES[1:]:
        theirs = medians[policy]
        hits, rate = ours.hit_rate / max(theirs.hit_rate, 1e-9), ours.tokens_per_s / theirs.tokens_per_s
        print(f"{f'prefix / {policy}':<24}{hits:>10.2f}{rate:>10.2f}")


async def compare_routers(cluster: Cluster, options: argparse.Namespace) -> None:
    pair = [cluster.routers["prefix"], cluster.router("second", "prefix")]
    rounds: dict[int, list[Round]] = {1: [], 2: []}
    for number in range(options.rounds):
        requests = make_requests(NUM_PREFIXES, NUM_PREFIXES * PROMPTS_PER_PREFIX, seed=100 + number)
        for count in (1, 2) if number % 2 else (2, 1):
            rounds[count].append(await cluster.round(pair[:count], requests, options.concurrency))
    one, two = (Round(*map(statistics.median, zip(*rounds[count], strict=True))) for count in (1, 2))
    print(f"\ntwo routers: {two.tokens_per_s:.0f} tokens/s, {two.hit_rate:.1%} cached; one: {one.tokens_per_s:.0f}", end="")
    print(f", {one.hit_rate:.1%} cached; ratio {two.tokens_per_s / one.tokens_per_s:.2f}")


async def show_idle(cluster: Cluster, options: argparse.Namespace) -> None:
    """Let everything rest, and measure."""
    router, engine = cluster.routers["prefix"], cluster.engines[0]
    links = {"link of the router": router.pids()["link"], "link of an engine": engine.pids()["link"]}
    pids = {"router": router.pids()["supervisor"], **links}
    await asyncio.sleep(2)
    before = {name: processor_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(options.seconds)
    print(f"\nrouter with {NUM_ENGINES} engines: ready after {router.server.ready_s:.2f} s")
    for name, pid in pids.items():
        share = (processor_s(pid) - before[name]) / options.seconds
        print(f"{name}: PSS {pss_bytes(pid) / 2**20:.0f} MiB, idle {share:.2%} of a core")


async def show_silence(cluster: Cluster, options: argparse.Namespace) -> None:
    """Stop or kill an engine under streams, each several times, and time what its prompt and answer take alone."""
    router = cluster.routers["prefix"]
    alone = await _alone_s(cluster.engines[1])
    print(f"\nprompt and answer computed again, alone: {alone:.2f} s; longest pause of {NUM_STREAMS} streams:", end="")
    for name in ("silent", "killed"):
        pauses = []
        for number in range(options.rounds):
            victim = cluster.engines[0] if name == "silent" else cluster.spare(f"{name}{number}")
            pauses.append(await _longest_pause(router, victim, signal.SIGSTOP if name == "silent" else signal.SIGKILL))
        print(f" {name} {statistics.median(pauses):.2f} s (alone + {statistics.median(pauses) - alone:.2f} s)", end=";")
    print()


async def _alone_s(engine: Process) -> float:
    """Return the time to the first token of a prompt as long as a whole stream."""
    times = []
    for seed in range(3):
        tokens = random.Random(seed).choices(range(1, 8000), k=STREAM_LEN)
        body = {"prompt": tokens, "max_tokens": 1, "ignore_eos": True, "stream": True}
        load = Load(engine.client, "/v1/completions", [orjson.dumps(body)], lambda: None)
        await load.in_waves(1)
        times.append(load.wall_s)
    return statistics.median(times)


async def _longest_pause(router: Process, victim: Process, number: int) -> float:
    """Return the longest pause of a stream, from the signal until all streams have continued."""
    streams = [Stream(router.client, STREAM_LEN, vocabulary=VOCABULARY) for _ in range(NUM_STREAMS)]
    rng = random.Random(7)
    tasks = [asyncio.create_task(stream.run(rng)) for stream in streams]
    try:
        await _all_continue(streams)
        begin_s = time.perf_counter()
        pids = victim.pids().values()
        for pid in pids:
            os.kill(pid, number)
        await _until(lambda: _num_ready(router) < len(router.run.engines()))
        await _all_continue(streams)
        await asyncio.sleep(1)
        if number == signal.SIGSTOP:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            await _until(lambda: _num_ready(router) >= NUM_ENGINES)
        assert not any(stream.num_failed for stream in streams)
        return max(pause for stream in streams for pause in stream.pauses(begin_s))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_continue(streams: Sequence[Stream]) -> None:
    before_s = time.perf_counter()
    await _until(lambda: all(stream.times and stream.times[-1] > before_s for stream in streams))


async def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, "streams do not continue"
        await asyncio.sleep(0.02)


async def measure(options: argparse.Namespace) -> None:
    parts = options.part or PARTS
    if "choice" in parts:
        show_choice()
    if not {*parts} - {"choice"}:
        return
    policies = POLICIES if {"prefixes", "one prefix"} & {*parts} else ("prefix",)
    with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as name:
        cluster = Cluster(Path(name), policies, options.concurrency)
        try:
            if "idle" in parts:
                await show_idle(cluster, options)
            if "prefixes" in parts:
                await compare_policies(cluster, NUM_PREFIXES, options)
            if "one prefix" in parts:
                await compare_policies(cluster, 1, options)
            if "two routers" in parts:
                await compare_routers(cluster, options)
            if "silence" in parts:
                await show_silence(cluster, options)
        finally:
            cluster.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.routers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="and signals of each kind; default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=16, help="streams of all routers; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of rest; default: %(default)s")
    asyncio.run(measure(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

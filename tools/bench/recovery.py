"""Longest gap in streams when an actor is killed, and memory of a layout: `python -m tools.bench.recovery`.

    python -m tools.bench.recovery 'tp 2=tokamak serve --model M -tp 2 --run-dir {run} --port {port}' ...

While each engine answers streams, an actor of each kind is killed with SIGKILL several times. The result is the longest time
in which a stream got no token, from the kill until the engine is healthy again and all streams have continued. Streams that
lose their connection with a killed api are requested again. With several replicas, streams use them in turn, and those of
replicas without a kill are shown apart. The memory is the engine's proportional set size before the first kill.

A killed actor is killed again only when it is healthy, because the supervisor delays each restart longer. So twenty kills of
each kind take minutes: `--results FILE --seconds 150` does a part of them, and the next call continues.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.observation.observer import Observer
from engine.observation.snapshot import Actor
from engine.process.run_directory import open_run
from engine.process.topology import SCHEDULER, actors_of, index_of, partner_of, role_of
from engine.supervisor.restarts import HEALTHY_S
from tools.bench.compare import server_argument
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess
from tools.bench.streams import Stream
from tools.target import Target

KINDS = ("worker", "scheduler", "cache", "tokenizer", "media", "api")
OF_REPLICAS = KINDS[:3]
OTHERS = "{}, other replicas' streams"
_READY = ("READY", "RUNNING")
_LOOK_S = 0.02
_GIVE_UP_S = 60.0
_MARGIN_S = 1.0  # the supervisor sees readiness later than this program


class Result(msgspec.Struct):
    """Outcome of one kill."""

    engine: str
    title: str
    seconds: float
    num_bytes: int


class Results:
    """Outcomes of all kills; with a `file`, also of earlier calls."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_bytes().splitlines() if file is not None and file.exists() else []
        self._results = [msgspec.json.decode(line, type=Result) for line in lines]

    def add(self, result: Result) -> None:
        self._results.append(result)
        if self._file is not None:
            with self._file.open("ab") as stream:
                stream.write(msgspec.json.encode(result) + b"\n")

    def seconds(self, engine: str, title: str) -> list[float]:
        return [result.seconds for result in self._results if (result.engine, result.title) == (engine, title)]

    def num_bytes(self, engine: str) -> int:
        return max((result.num_bytes for result in self._results if result.engine == engine), default=0)


class Engine:
    """Running engine, observed from outside."""

    def __init__(self, name: str, command: str, directory: Path, options: argparse.Namespace) -> None:
        run_directory = directory / name.replace(" ", "-")
        command = command.replace("{run}", str(run_directory))
        self.server = ServerProcess(name, command, directory / "log", timeout_s=300)
        self._run = open_run(run_directory)
        self._options = options

    def actors(self) -> list[Actor]:
        with contextlib.closing(Observer(self._run)) as observer:
            return observer.snapshot().actors

    async def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _GIVE_UP_S
        while not is_so():
            assert time.monotonic() < deadline, "the engine did not become whole again"
            await asyncio.sleep(_LOOK_S)

    def _is_whole(self) -> bool:
        return all(actor.is_alive and actor.state in _READY for actor in self.actors() if actor.name != "supervisor")

    async def kill(self, results: Results, end: float) -> None:
        """Kill actors of the requested kinds in turn, until each has died often enough or the monotonic clock reaches `end`."""
        rng = random.Random()
        client = Client(Target.parse(self.server.url), 600)
        names = [actor.name for actor in self.actors()]
        schedulers = actors_of(SCHEDULER, names)
        pins: list[int | None] = [index_of(name) for name in schedulers] if len(schedulers) > 1 else [None]
        streams = [Stream(client, self._options.output_len, pins[i % len(pins)]) for i in range(self._options.streams)]
        healthy_s = dict.fromkeys(names, 0.0)  # monotonic time from which it may be killed
        tasks = [asyncio.create_task(stream.run(rng)) for stream in streams]
        try:
            await self._until(lambda: all(stream.times for stream in streams))
            self.server.measure_memory()
            num_bytes = self.server.peak_bytes
            while left := self._kinds_left(names, results):
                for kind in left:
                    if time.monotonic() >= end:
                        return
                    victims = [name for name in names if role_of(name) == kind]
                    rng.shuffle(victims)
                    victim = min(victims, key=lambda name: healthy_s[name])
                    await asyncio.sleep(max(0.0, healthy_s[victim] - time.monotonic()))
                    begin = await self._recovered(victim, streams)
                    healthy_s[victim] = time.monotonic() + HEALTHY_S + _MARGIN_S
                    own = index_of(partner_of(victim, SCHEDULER, names)) if kind in OF_REPLICAS else None
                    parts = {kind: [stream for stream in streams if own is None or stream.replica in (None, own)]}
                    parts[OTHERS.format(kind)] = [stream for stream in streams if stream not in parts[kind]]
                    for title, some in parts.items():
                        if some:
                            longest = max(pause for stream in some for pause in stream.pauses(begin))
                            results.add(Result(self.server.name, title, longest, num_bytes))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.close()

    def _kinds_left(self, names: list[str], results: Results) -> list[str]:
        there = [kind for kind in self._options.kinds if any(role_of(name) == kind for name in names)]
        return [kind for kind in there if len(results.seconds(self.server.name, kind)) < self._options.kills]

    async def _recovered(self, name: str, streams: list[Stream]) -> float:
        """Kill the actor, wait until everything continues, and return the time of the kill in `perf_counter` seconds."""
        await self._until(self._is_whole)
        await self._have_all_gone_on(streams)
        (victim,) = (actor for actor in self.actors() if actor.name == name)
        begin = time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)
        await self._until(lambda: self._is_replaced(victim))
        await self._have_all_gone_on(streams)
        return begin

    async def _have_all_gone_on(self, streams: list[Stream]) -> None:
        before = time.perf_counter()
        await self._until(lambda: all(stream.times[-1] > before for stream in streams))

    def _is_replaced(self, victim: Actor) -> bool:
        return any(actor.name == victim.name and actor.pid != victim.pid for actor in self.actors()) and self._is_whole()


async def measure(options: argparse.Namespace) -> None:
    results, end = Results(options.results), time.monotonic() + options.seconds
    for name, command in options.engines:
        if time.monotonic() >= end or all(len(results.seconds(name, kind)) >= options.kills for kind in options.kinds):
            continue
        with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as directory:
            engine = Engine(name, command, Path(directory), options)
            try:
                await engine.kill(results, end)
            finally:
                engine.server.stop()
    names = [name for name, _ in options.engines]
    print(f"| longest pause of {options.streams} streams, s | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for title in (title for kind in KINDS for title in (kind, OTHERS.format(kind))):
        found = [results.seconds(name, title) for name in names]
        if any(found):
            print(f"| {title} | {' | '.join(_cell(seconds) if seconds else '-' for seconds in found)} |")
    print(f"| PSS MiB | {' | '.join(str(results.num_bytes(name) >> 20) for name in names)} |")


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} kills)"


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"unknown kinds {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.recovery", description=__doc__.partition("\n")[0])
    parser.add_argument("engines", nargs="+", type=server_argument, metavar="NAME=COMMAND", help="{port}, {run} are filled in")
    parser.add_argument("--kills", type=int, default=20, help="of each kind of actor; default: %(default)s")
    parser.add_argument("--kinds", type=_kinds, default=KINDS, metavar="KIND,...", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--results", type=Path, metavar="FILE", help="of all kills; what lies there counts, and is shown")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="kill none after that; default: no limit")
    parser.add_argument("--streams", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--output-len", type=int, default=200, help="tokens of an answer; default: %(default)s")
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

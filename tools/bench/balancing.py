"""Gain and cost of moving experts: `python -m tools.bench.balancing`.

    python -m tools.bench.moe_shape one-sided --one-sided
    python -m tools.bench.balancing "tokamak serve --model one-sided -dp 2 --enable-expert-parallel --enable-eplb \
        --eplb-config '{\"check_interval_s\": 1000}' --threads 1 --run-dir {run} --port {port}"

Streams run throughout. After a while a command moves the experts (`tokamak ctl rebalance`), and the run continues for as long
again. Measured before and after: tokens per second of all streams, and max/mean of the ranks' rows. Also shown are the longest
gap of a stream, from the command until a second after the move, next to the 99th percentile of earlier gaps; and the number of
failed streams.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.messages import RebalanceExperts
from engine.parallel.eplb import imbalance
from engine.parallel.placement import placement_of
from engine.process.control_client import ControlClient
from engine.process.run_directory import open_run
from shm.experts import ExpertTable
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess
from tools.bench.streams import Stream
from tools.target import Target

_LOOK_S = 0.02
_SETTLED_S = 1.0


class Experts:
    """Counts of ranks, and the placement of experts."""

    def __init__(self, run_id: str) -> None:
        self._table = ExpertTable.attach(run_id, is_readonly=True)
        self._shape = len(self._table.layers), self._table.num_experts

    @property
    def version(self) -> int:
        return self._table.in_force.version

    def counts(self) -> np.ndarray:
        """Return the rows of each expert, int64 [layers, experts]."""
        counts: np.ndarray = np.frombuffer(self._table.counts, np.int64).reshape(-1, *self._shape).sum(axis=0)
        return counts

    def imbalance(self, counts: np.ndarray) -> float:
        """Return max/mean of the ranks' rows with the present placement, averaged over the layers."""
        owners = np.frombuffer(self._table.committed()[1], np.int32).reshape(*self._shape, -1)
        return statistics.mean(
            imbalance(placement_of(layer), rows) for layer, rows in zip(owners, counts.tolist(), strict=True)
        )

    def close(self) -> None:
        self._table.close()


class Phase:
    """Period of measurement, and its counts."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._counts = experts.counts()
        self.begin = self.end = time.perf_counter()
        self.imbalance = 0.0

    def finish(self) -> None:
        self.end = time.perf_counter()
        self.imbalance = self._experts.imbalance(self._experts.counts() - self._counts)

    def rate(self, streams: Sequence[Stream]) -> float:
        """Tokens per second."""
        return sum(self.begin <= at < self.end for stream in streams for at in stream.times) / (self.end - self.begin)

    def pauses(self, streams: Sequence[Stream]) -> list[float]:
        """Return seconds between tokens of a stream; those that overlap the phase count too."""
        return [pause for stream in streams for pause in stream.pauses(self.begin, self.end)]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(_LOOK_S)


async def measure(command: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as directory:
        run_directory = Path(directory) / "run"
        server = ServerProcess(
            "balancing", command.replace("{run}", str(run_directory)), Path(directory) / "log", timeout_s=600
        )
        try:
            run = open_run(run_directory)
            experts = Experts(run.run_id)
            client = Client(Target.parse(server.url), 600)
            streams = [Stream(client, options.output_len) for _ in range(options.streams)]
            rng = random.Random(0)
            tasks = [asyncio.create_task(stream.run(rng)) for stream in streams]
            await until(lambda: all(stream.times for stream in streams))
            before = Phase(experts)
            await asyncio.sleep(options.seconds)
            before.finish()
            version, move = experts.version, Phase(experts)
            reply = await asyncio.to_thread(ControlClient(run).ask, RebalanceExperts(), 600.0)
            print(f"{reply.message} ({time.perf_counter() - move.begin:.2f} s)")
            await until(lambda: experts.version != version)
            await asyncio.sleep(_SETTLED_S)
            move.finish()
            after = Phase(experts)
            await asyncio.sleep(options.seconds)
            after.finish()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.close()
            experts.close()
        finally:
            server.stop()
    num_failed = sum(stream.num_failed for stream in streams)
    pauses = before.pauses(streams)
    p99 = sorted(pauses)[len(pauses) * 99 // 100]
    longest = max(move.pauses(streams))
    print("| | before | after | ratio |\n|---|---|---|---|")
    print(f"| max/mean of the ranks' rows | {before.imbalance:.2f} | {after.imbalance:.2f} | |")
    rates = before.rate(streams), after.rate(streams)
    print(f"| tokens/s of {len(streams)} streams | {rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.2f} |")
    print(f"| p99 pause; the longest around the move, s | {p99:.3f} | {longest:.3f} | {longest / p99:.2f} |")
    print(f"| streams that failed | {num_failed} | | |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.balancing", description=__doc__.partition("\n")[0])
    parser.add_argument("command", help="starts the engine; {port}, {run} are filled in")
    parser.add_argument("--streams", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=15.0, help="before and after; default: %(default)s")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of an answer; default: %(default)s")
    options = parser.parse_args()
    asyncio.run(measure(options.command, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())

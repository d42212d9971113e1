"""`tokamak bench shm`: latency and throughput of Tokamak's shared-memory queues, compared with pyzmq and multiprocessing.Queue.

Runs in the process that sends; `main` is called by tools/cli.py. For each route (routes.py) and size a receiving process is
forked, before any thread is started. Rounds alternate between all of them, so that other load affects all alike; shown are
medians over the rounds.

    back to back   to and fro without a pause: half of a round trip. The bar is on this: 256 B p50 at most a quarter of pyzmq's
    paced          a send now and then, so that the receiver sleeps and its core has gone to other things; one way, by the clock
                   in the payload. Mostly the time that the machine takes to wake a process: once here, three times for pyzmq
    stream         as fast as it goes; payloads per second at the receiver
    idle           processor time of a receiver that waits for a second
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.options.argument_parser import ArgumentParser
from shm._native import set_parent_death_signal
from shm.mailbox import DEFAULT_SPIN_NS
from tools.bench.report import percentile
from tools.bench.routes import QueueRoute, RingRoute, Route, SlabRoute, ZeroMQRoute, stamped
from tools.units import size as size_text

SIZES = (64, 256, 4096, 1 << 20)
SLAB_FROM = 1 << 18  # bytes; smaller payloads go through the ring itself
CONTENDERS = ("tokamak", "pyzmq", "mp.Queue")
BAR_SIZE, BAR_RATIO = 256, 4.0
STREAM_BYTES = 64 << 20
IDLE_S = 1.0
TITLES = {
    "echo_p50": "back to back, p50 us",
    "echo_p99": "p99 us",
    "paced_p50": "paced, p50 us",
    "paced_p99": "p99 us",
    "stream_rate": "stream, 1000/s",
    "stream_mib": "MiB/s",
}

Figures = dict[tuple[str, int], dict[str, float]]  # (contender, payload bytes) -> name in TITLES -> value


@dataclass(slots=True)
class Lane:
    """A contender at one size: a route in each direction, and the process at the other end."""

    contender: str
    num_bytes: int
    there: Route
    back: Route
    orders: Connection
    receiver: BaseProcess

    def ask(self, order: str, count: int) -> None:
        self.orders.send((order, count))
        self.orders.recv()  # it is listening


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; with --check, return 1 if the bar is missed."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="tokamak-bench-") as directory:
        lanes = [
            _open(contender, num_bytes, Path(directory), options.spin_us * 1000)
            for num_bytes in options.sizes
            for contender in CONTENDERS
        ]
        try:
            figures, idle = _measure(lanes, options)
        except KeyboardInterrupt:
            return 130
        finally:
            for lane in lanes:
                _close(lane)
    ratio = _bar(figures)
    if options.json:
        rows = [{"route": name, "bytes": num_bytes, **row} for (name, num_bytes), row in figures.items()]
        print(json.dumps({"rows": rows, "idle_cpu_s": idle, "bar_ratio": ratio}, indent=2))
    else:
        _print(figures, idle, ratio)
    return int(options.check and (ratio is None or ratio < BAR_RATIO))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="tokamak bench shm", description="Latency and throughput of the shared-memory queues.")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds through all routes and sizes (default 5)")
    parser.add_argument("--count", type=int, default=300, help="number of paced sends per round (default 300)")
    parser.add_argument("--interval-us", type=int, default=1000, help="time between paced sends (default 1000)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES", help="payload sizes, at least 8")
    parser.add_argument(
        "--spin-us",
        type=int,
        default=DEFAULT_SPIN_NS // 1000,
        help=f"time that a ring's reader spins (default {DEFAULT_SPIN_NS // 1000})",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with code 1 unless 256 B take at most a quarter of the time of pyzmq"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.count < 1 or min(options.sizes) < 8:
        parser.error("--rounds and --count must be at least 1, --sizes at least 8")
    if options.check and BAR_SIZE not in options.sizes:
        parser.error(f"--check needs {BAR_SIZE} among --sizes")
    return options


def _open(contender: str, num_bytes: int, directory: Path, spin_ns: int) -> Lane:
    there, back = (_route(contender, num_bytes, directory, spin_ns) for _ in range(2))
    context = multiprocessing.get_context("fork")
    orders, theirs = context.Pipe()
    receiver = context.Process(target=_serve, args=(theirs, there, back, num_bytes), daemon=True)
    receiver.start()
    theirs.close()
    return Lane(contender, num_bytes, there, back, orders, receiver)


def _route(contender: str, num_bytes: int, directory: Path, spin_ns: int) -> Route:
    run_id = secrets.token_hex(4)
    if contender == "pyzmq":
        return ZeroMQRoute(f"ipc://{directory / run_id}", num_bytes)
    if contender == "mp.Queue":
        return QueueRoute()
    if num_bytes >= SLAB_FROM:
        return SlabRoute(run_id, "bench", spin_ns, num_bytes)
    return RingRoute(run_id, "bench", spin_ns)


def _close(lane: Lane) -> None:
    lane.receiver.kill()
    lane.receiver.join()
    lane.there.remove()
    lane.back.remove()


def _serve(orders: Connection, there: Route, back: Route, num_bytes: int) -> None:
    """Run the receiving process: execute commands until it is killed."""
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    payload = bytearray(num_bytes)
    while True:
        order, count = orders.recv()
        orders.send("listening")
        if order == "latency":
            orders.send([time.monotonic_ns() - stamp for stamp in _stamps(there, count)])
        elif order == "echo":
            for _ in _stamps(there, count):
                back.send(stamped(payload))
        elif order == "stream":
            there.receive()
            begin = time.monotonic_ns()
            for _ in _stamps(there, count - 1):
                pass
            orders.send(time.monotonic_ns() - begin)
        else:
            begin_s = time.process_time()
            there.receive()
            orders.send(time.process_time() - begin_s)


def _stamps(route: Route, count: int) -> Iterator[int]:
    return (route.receive() for _ in range(count))


def _measure(lanes: Sequence[Lane], options: argparse.Namespace) -> tuple[Figures, dict[str, float]]:
    """Return medians over the rounds for each (contender, size), and the idle CPU time of each contender."""
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {(lane.contender, lane.num_bytes): [] for lane in lanes}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=(options.rounds + 1) * len(lanes))
        for index in range(options.rounds + 1):
            for lane in lanes:
                progress.update(task, description=f"{lane.contender}, {size_text(lane.num_bytes)}")
                figures = _round(lane, options.count if index else 20, options.interval_us / 1e6)
                if index:  # the first round warms up
                    rounds[lane.contender, lane.num_bytes].append(figures)
                progress.advance(task)
        progress.update(task, description="idle")
        idle = {lane.contender: _idle(lane) for lane in lanes[: len(CONTENDERS)]}
    medians = {
        key: {name: statistics.median(figures[name] for figures in found) for name in TITLES} for key, found in rounds.items()
    }
    return medians, idle


def _round(lane: Lane, count: int, interval_s: float) -> dict[str, float]:
    is_large = lane.num_bytes >= SLAB_FROM  # every contender must keep up, otherwise the wait in its queue would count
    paced = _paced(lane, max(5, count // 5), 5 * interval_s) if is_large else _paced(lane, count, interval_s)
    echo = _back_to_back(lane, max(10, count * 2))
    rate = _stream(lane, max(10, min(100 * count, STREAM_BYTES // lane.num_bytes)))
    return {
        "paced_p50": percentile(paced, 0.5),
        "paced_p99": percentile(paced, 0.99),
        "echo_p50": percentile(echo, 0.5),
        "echo_p99": percentile(echo, 0.99),
        "stream_rate": rate / 1000,
        "stream_mib": rate * lane.num_bytes / (1 << 20),
    }


def _paced(lane: Lane, count: int, interval_s: float) -> list[float]:
    """Return microseconds one way."""
    payload = bytearray(lane.num_bytes)
    lane.ask("latency", count)
    for _ in range(count):
        time.sleep(interval_s)
        lane.there.send(stamped(payload))
    return [latency / 1000 for latency in lane.orders.recv()]


def _back_to_back(lane: Lane, count: int) -> list[float]:
    """Return microseconds of half a round trip."""
    payload = bytearray(lane.num_bytes)
    halves = []
    lane.ask("echo", count)
    for _ in range(count):
        begin = time.monotonic_ns()
        lane.there.send(stamped(payload))
        lane.back.receive()
        halves.append((time.monotonic_ns() - begin) / 2000)
    return halves


def _stream(lane: Lane, count: int) -> float:
    """Return payloads per second."""
    payload = bytearray(lane.num_bytes)
    lane.ask("stream", count)
    for _ in range(count):
        lane.there.send(payload)
    nanoseconds: int = lane.orders.recv()
    return (count - 1) / nanoseconds * 1e9


def _idle(lane: Lane) -> float:
    """Return CPU seconds of the receiver during IDLE_S of waiting."""
    lane.ask("idle", 1)
    time.sleep(IDLE_S)
    lane.there.send(stamped(bytearray(lane.num_bytes)))
    seconds: float = lane.orders.recv()
    return seconds


def _bar(figures: Figures) -> float | None:
    """Return how many times longer pyzmq takes; None: the size was not measured."""
    if ("tokamak", BAR_SIZE) not in figures:
        return None
    return figures["pyzmq", BAR_SIZE]["echo_p50"] / figures["tokamak", BAR_SIZE]["echo_p50"]


def _print(figures: Figures, idle: dict[str, float], ratio: float | None) -> None:
    console = Console()
    console.print(_table(figures))
    seconds = ", ".join(f"{contender} {1000 * value:.2f} ms" for contender, value in idle.items())
    console.print(f"CPU time of a receiver that waits for {IDLE_S:.0f} s: {seconds}", soft_wrap=True)
    if ratio is not None:
        console.print(
            (f"{BAR_SIZE} B back to back: pyzmq takes {ratio:.1f} times as long; the required {BAR_RATIO:.0f} times are ")
            + ("met" if ratio >= BAR_RATIO else "missed"),
            soft_wrap=True,
        )


def _table(figures: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("payload", no_wrap=True)
    table.add_column("", no_wrap=True)
    for contender in CONTENDERS:
        table.add_column(contender, justify="right")
    table.add_column("vs pyzmq", justify="right")
    for num_bytes in dict.fromkeys(num_bytes for _, num_bytes in figures):
        for name, title in TITLES.items():
            ours, theirs, queue = (figures[contender, num_bytes][name] for contender in CONTENDERS)
            ratio = ours / theirs if name.startswith("stream") else theirs / ours
            label = size_text(num_bytes) + (" (slab)" if num_bytes >= SLAB_FROM else "")
            cells = [f"{value:,.1f}" for value in (ours, theirs, queue)]
            table.add_row(label if name == "echo_p50" else "", title, *cells, f"{ratio:.1f} x")
        table.add_section()
    return table

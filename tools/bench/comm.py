"""`tokamak bench comm`: collectives of two ranks through the comm arena, compared with paddle.distributed over gloo.

Each rank is a process. Rounds alternate between routes, sizes and collectives, so that other load affects all alike. Shown are
medians over the calls of all rounds on rank 0, and how many times faster the arena is. The bars: 10 at 4 and 64 KiB, 4 at 1
MiB, 2 at 16 MiB.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from engine.options.argument_parser import ArgumentParser
from shm.rank_group import RankGroupHeader, buffers_at
from shm.segment import MemoryFile
from tools.units import size as size_text
from workers.rank_group.communicator import Communicator
from workers.rank_group.gloo import gloo_calls

NUM_RANKS = 2
BARS = {4 << 10: 10.0, 64 << 10: 10.0, 1 << 20: 4.0, 16 << 20: 2.0}  # bytes of each rank: minimum speed relative to gloo
OPS = ("all_gather", "all_reduce")
_BYTES_A_TURN = 32 << 20  # calls per size and round: more for small sizes
_TIMEOUT_S = 60.0

Times = dict[tuple[str, int, str], list[float]]  # collective, bytes, route: microseconds of each call


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="tokamak bench comm", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(BARS), metavar="BYTES", help="bytes per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a required speed is missed")
    options = parser.parse_args(arguments)
    if any(size < 4 or size % 4 for size in options.sizes):
        parser.error("--sizes must be multiples of 4, because floats are added")
    rows = _rows(_measure(options.sizes, options.rounds))
    print(json.dumps(rows)) if options.json else _show(rows)
    is_missed = any(row["ratio"] < BARS.get(row["bytes"], 0.0) for row in rows)
    return 1 if options.check and is_missed else 0


def _measure(sizes: list[int], rounds: int) -> Times:
    context = multiprocessing.get_context("spawn")
    arena = MemoryFile.create("tokamak-bench-comm", buffers_at(NUM_RANKS))
    header = RankGroupHeader.begin(arena.buffer, NUM_RANKS)
    for rank in range(NUM_RANKS):
        header.set_member(rank, True)
    ours, theirs = context.Pipe(duplex=False)
    port = _free_port()
    processes = [
        context.Process(target=_run, args=(rank, DupFd(arena.fd), arena.num_bytes, port, sizes, rounds, theirs), daemon=True)
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    theirs.close()
    times: Times = ours.recv()  # EOFError: rank 0 died and printed the cause
    for process in processes:
        process.join()
    return times


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _run(rank: int, arena: Any, num_bytes: int, port: int, sizes: list[int], rounds: int, answers: Connection) -> None:
    """Run one rank."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Paddle prints much
    gloo = gloo_calls(rank, NUM_RANKS, port)
    memory = MemoryFile.from_fd(arena.detach(), num_bytes).buffer
    communicator = Communicator(memory, rank, 0, NUM_RANKS, timeout_s=_TIMEOUT_S)
    communicator.join()
    native: dict[str, Callable[[np.ndarray], object]] = {
        "all_gather": communicator.all_gather,
        "all_reduce": lambda x: communicator.all_reduce(x, in_place=True),  # in place, like gloo
    }
    times: Times = defaultdict(list)
    for _ in range(rounds):
        for op in OPS:
            for size in sizes:
                x = np.full(size // 4, rank + 1.0, np.float32)
                for route, calls in (("tokamak", native), ("gloo", gloo)):
                    call = calls[op]
                    call(x)
                    for _ in range(max(2, min(50, _BYTES_A_TURN // size))):
                        communicator.barrier()
                        begin_ns = time.perf_counter_ns()
                        call(x)
                        times[op, size, route].append((time.perf_counter_ns() - begin_ns) / 1e3)
    if rank == 0:
        answers.send(dict(times))


def _rows(times: Times) -> list[dict[str, Any]]:
    rows = []
    for op, size in dict.fromkeys((op, size) for op, size, _ in times):
        tokamak_us, gloo_us = (statistics.median(times[op, size, route]) for route in ("tokamak", "gloo"))
        rows.append({"op": op, "bytes": size, "tokamak_us": tokamak_us, "gloo_us": gloo_us, "ratio": gloo_us / tokamak_us})
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE, title=f"collectives of {NUM_RANKS} ranks, median us")
    for title in ("", "size", "tokamak", "gloo", "faster", "bar"):
        table.add_column(title, justify="left" if not title else "right")
    for row in rows:
        bar = BARS.get(row["bytes"])
        shown = [f"{row[name]:.1f}" for name in ("tokamak_us", "gloo_us", "ratio")]
        table.add_row(row["op"], size_text(row["bytes"]), *shown, f"{bar:g}" if bar else "")
    Console().print(table)

"""Rounds over several running servers: each round sends the same requests to each in turn and begins with another one.

Used by copying.py and chats.py. Compared are medians of the rounds, relative to the first server.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from engine.errors import TokamakError
from tools.bench.compare import server_argument
from tools.bench.connection import Client
from tools.bench.processes import ServerProcess
from tools.bench.report import summarize
from tools.bench.serve import Load
from tools.bench.timeline import Timeline
from tools.target import Target

TIMEOUT_S = 600.0
FIGURES = {"decode tok/s": "decode_tokens_per_s", "out tok/s": "output_tokens_per_s", "TTFT ms": "ttft_ms"}
STREAM_RATE = "stream_tokens_per_s"


def _stream_rate(timelines: Sequence[Timeline]) -> float | None:
    """Return the tokens per second of a stream after its first token, from the mean time."""
    streams = [each for each in timelines if not each.error and each.num_output_tokens > 1]
    seconds = sum(each.deliveries[-1] - each.deliveries[0] for each in streams)
    return sum(each.num_output_tokens - 1 for each in streams) / seconds if seconds else None


async def _measure(url: str, path: str, requests: Sequence[bytes], concurrency: int) -> dict[str, Any]:
    client = Client(Target.parse(url), TIMEOUT_S)
    try:
        load = Load(client, path, requests, lambda: None)
        await load.in_waves(concurrency)
    finally:
        client.close()
    result = summarize(load.timelines, load.wall_s, load.cpu_s)
    if result["num_failed"]:
        raise TokamakError(f"{result['errors']}")
    return result | {STREAM_RATE: _stream_rate(load.timelines)}


def measure(url: str, path: str, requests: Sequence[bytes], concurrency: int) -> dict[str, Any]:
    """Run `requests`, `concurrency` at a time, and return the figures. TokamakError if one fails."""
    return uvloop.run(_measure(url, path, requests, concurrency))


def _figure(result: dict[str, Any], key: str) -> float | None:
    value: Any = result[key]
    return None if value is None else float(value["p50"] if isinstance(value, dict) else value)


def compare(
    servers: Sequence[ServerProcess],
    title: str,
    num_rounds: int,
    ask: Callable[[ServerProcess, int], dict[str, Any]],
    console: Console,
    figures: Mapping[str, str] = FIGURES,
) -> list[str]:
    """Return the rows of the table. `ask`: runs a round on a server and returns the result of `measure`."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(num_rounds):
        first = number % len(servers)
        for server in (*servers[first:], *servers[:first]):
            result = ask(server, number)
            for figure, key in figures.items():
                if (value := _figure(result, key)) is not None:
                    found.setdefault((figure, server.name), []).append(value)
    lines = []
    for figure in figures:
        measured = [found.get((figure, server.name), []) for server in servers]
        if not all(measured):
            continue
        medians = [statistics.median(values) for values in measured]
        ratios = [f"{median / medians[0]:.3f}" for median in medians[1:]]
        cells = [f"{title} {figure}"]
        for median, values in zip(medians, measured, strict=True):
            cells.append(f"{median:.4g} ({min(values):.4g} to {max(values):.4g})")
        lines.append(f"| {' | '.join([*cells, *ratios])} |")
        console.print(lines[-1])
    return lines


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by all these programs."""
    parser.add_argument("servers", nargs="+", type=server_argument, metavar="NAME=COMMAND", help="{port} is filled in")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4], metavar="N,...", help="default: 1,4")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--logs", type=Path, default=Path("."), metavar="DIRECTORY", help="of the servers' logs; default: here")


def run(options: argparse.Namespace, rows: Callable[[list[ServerProcess], Console], list[str]]) -> None:
    """Start the servers, print the table of `rows`, end them."""
    with contextlib.ExitStack() as running:
        servers = []
        for name, command in options.servers:
            servers.append(ServerProcess(name, command, options.logs / f"{name}.log", TIMEOUT_S))
            running.callback(servers[-1].stop)
        lines = rows(servers, Console(file=sys.stderr, soft_wrap=True, highlight=False))
    names = [server.name for server in servers]
    print(f"| median of rounds | {' | '.join([*names, *(f'{name} / {names[0]}' for name in names[1:])])} |")
    print("\n".join([f"|{'---|' * (2 * len(names))}", *lines]))

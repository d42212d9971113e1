"""A relay for tests, between routers and engines: it delays, splits, slows, cuts and closes connections as it is told.

    router  <->  relay (one port for each engine)  <->  engine

A process of its own, so that a busy test delays nothing. `Relay` starts it and sends it commands; `main` is the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.paths import REPOSITORY

UP, DOWN = "up", "down"  # to the engine; to the router
_READ_BYTES = 16 << 10


class Relay:
    """Relay in front of the engines at `targets`; `addresses` are those that a router connects to."""

    def __init__(self, targets: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.e2e.relay", *targets]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.addresses: list[str] = json.loads(self._process.stdout.readline())

    def tell(self, engine: int, **rules: Any) -> None:
        """Change what happens to the connections of an engine, old and new, from now on; see `_Rules`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"engine": engine, **rules}) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends with its input
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Rules:
    """Rules for the connections to one engine."""

    def __init__(self) -> None:
        self.cut: list[str] = []  # directions in which nothing passes; connections stay open
        self.bytes_per_s = 0  # in each direction; 0: no limit
        self.seed = 0  # of random pieces and pauses of up to `pause_s`; 0: none
        self.pause_s = 0.0
        self.break_after = 0  # bytes to the router, after which the connection is closed in the middle of them, once
        self.changed = asyncio.Event()

    def change(self, rules: dict[str, Any]) -> None:
        for name, value in rules.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()


class _Broken(Exception):
    pass


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str, rules: _Rules) -> None:
    """Pass bytes on in one direction until an end closes."""
    rng = random.Random(f"{rules.seed} {direction}")
    while data := await source.read(_READ_BYTES):
        while data:
            while direction in rules.cut:
                await rules.changed.wait()
            piece = data
            if rules.seed:
                piece = data[: rng.randrange(1, len(data) + 1)]
                await asyncio.sleep(rng.random() * rules.pause_s)
            if rules.bytes_per_s:
                piece = piece[:1000]
                await asyncio.sleep(len(piece) / rules.bytes_per_s)
            if rules.break_after and direction == DOWN:
                left = rules.break_after - len(piece)
                rules.break_after = max(0, left)
                if left <= 0:
                    sink.write(piece[: len(piece) + left])
                    await sink.drain()
                    raise _Broken
            sink.write(piece)
            await sink.drain()
            data = data[len(piece) :]


async def _serve(target: str, rules: _Rules, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = target.rpartition(":")
    ends = [writer]
    with contextlib.suppress(OSError, _Broken):
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ends.append(far_writer)
        passing = [
            asyncio.ensure_future(_pass(reader, far_writer, UP, rules)),
            asyncio.ensure_future(_pass(far_reader, writer, DOWN, rules)),
        ]
        _, others = await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
    for end in ends:
        end.transport.abort()  # type: ignore[attr-defined]


async def main(targets: Sequence[str]) -> None:
    """Relay until the standard input ends."""
    all_rules = [_Rules() for _ in targets]
    addresses = []
    for target, rules in zip(targets, all_rules, strict=True):

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str = target, rules: _Rules = rules
        ) -> None:
            await _serve(target, rules, reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(json.dumps(addresses), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        rules = json.loads(line)
        all_rules[rules.pop("engine")].change(rules)
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

"""A router under test: `tokamak router` as a child process of the test, for engines that listen on addresses of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from engine.cluster.key import make_key_file
from tests.e2e.engine_process import ADMIN_KEY, EngineProcess
from tests.waiting import WATCHDOG_S, wait_until
from tools.ctl import main as ctl

if TYPE_CHECKING:
    from typing_extensions import Self


class RouterProcess(EngineProcess):
    """`engines`: addresses in the router's list, which is written to `directory`."""

    def __init__(self, directory: Path, engines: Sequence[str], *options: str) -> None:
        super().__init__("")
        self.list = directory / "engines"
        self.write(engines)
        self.command = [sys.executable, "-m", "tools.cli", "router", "--engines", str(self.list), "--port", "0"]
        self.command += ["--admin-key", ADMIN_KEY, "--end-with", str(os.getpid()), *options]

    def ctl(self, *arguments: str) -> str:
        """Return what `tokamak ctl` prints about the router."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert ctl(["--run-dir", str(self.run.directory), *arguments]) == 0
        return output.getvalue()

    def write(self, engines: Sequence[str]) -> None:
        """Change the list at once."""
        unfinished = self.list.with_suffix(".new")
        unfinished.write_text("\n".join(["# engines", *engines, ""]))
        unfinished.replace(self.list)


class Cluster:
    """Two engines with the same options, a router and their key."""

    def __init__(self, directory: Path, model: Path, *options: str) -> None:
        self.directory = directory
        self._model, self._options = model, options
        self.key = directory / "cluster.key"
        make_key_file(self.key)
        self.addresses = [free_address(), free_address()]
        self.engines = [self.engine(address) for address in self.addresses]
        of_router = ("--cluster-key-file", str(self.key), "--restart-limit", "100", "--max-engines", "4", "--peer-timeout", "5")
        self.router = RouterProcess(directory, self.addresses, *of_router)

    def engine(self, address: str, *options: str) -> EngineProcess:
        cluster = ("--cluster-listen", address, "--cluster-key-file", str(self.key))
        return EngineProcess(self._model, *self._options, *cluster, *options)

    def start(self) -> None:
        self.engines[0].start()  # it measures kernels, and the others choose by that
        self.engines[1].launch()
        self.router.start()
        self.wait_for(2)

    def close(self) -> None:
        for process in [self.router, *self.engines]:
            process.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_again(self, index: int) -> None:
        """Replace an engine that was killed."""
        self.engines[index].close()
        self.engines[index] = self.engine(self.addresses[index])
        self.engines[index].launch()

    def num_ready(self) -> int:
        return len(httpx.get(f"{self.router.url}/load", timeout=WATCHDOG_S).json()["replicas"])

    def wait_for(self, num_engines: int) -> None:
        try:
            wait_until(lambda: self.num_ready() == num_engines, what=f"{num_engines} engines are ready")
        except TimeoutError as error:
            raise AssertionError(
                "\n".join([str(error), *(each.text[-2000:] for each in (self.router, *self.engines))])
            ) from None

    def wait_until_gone(self) -> None:
        """Wait until the router has given up one engine."""
        wait_until(lambda: "gone" in self.states(), what="an engine is gone")

    def states(self) -> list[str]:
        engines = httpx.get(f"{self.router.url}/load", timeout=WATCHDOG_S).json()["engines"]
        return [engine["state"] for engine in engines]

    async def kill(self, index: int, actor: str, number: int = signal.SIGKILL) -> None:
        """Kill an actor of the router (index -1) or of an engine, and wait until all is ready again."""
        victim = self.engines[index] if index >= 0 else self.router
        epoch = await asyncio.to_thread(victim.kill, actor, number)
        await asyncio.to_thread(victim.wait_for_restart, actor, epoch)
        await asyncio.to_thread(self.wait_for, 2)

    def is_idle(self) -> bool:
        return all(
            engine.metric("num_requests_running") == engine.metric("num_requests_waiting") == 0
            and engine.metric("link_open_sequences") == 0
            and engine.metric("num_free_kv_blocks") == engine.metric("num_kv_blocks")
            for engine in self.engines
        )


def free_address() -> str:
    """Return an address of loopback where nothing listens, below the ports that the kernel gives to others."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"

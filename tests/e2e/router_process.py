"""A router under test: `tokamak router` as a child process of the test, for engines that listen on addresses of loopback."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.engine_process import ADMIN_KEY, EngineProcess
from tools.ctl import main as ctl


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


def free_address() -> str:
    """Return an address of loopback where nothing listens, below the ports that the kernel gives to others."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"

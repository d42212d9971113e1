"""Ranks as real processes with one comm arena: each runs a function of a test."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

from shm.rank_group import RankGroupHeader, buffers_at
from shm.segment import MemoryFile
from tests.waiting import WATCHDOG_S
from workers.rank_group.communicator import Communicator

BUFFER_BYTES = 32 << 20
_SERVER = multiprocessing.get_context("forkserver")  # a process without threads that has imported everything
_SERVER.set_forkserver_preload([__name__, "tests.workers.rank_group.serving"])


@dataclass
class Rank:
    process: ForkServerProcess
    answers: Connection

    def answer(self) -> Any:
        """Return the function's result, or the type and text of the error that it raised."""
        assert self.answers.poll(WATCHDOG_S), "a rank does not answer"
        return self.answers.recv()

    def kill(self) -> None:
        self.process.kill()  # or it ended this moment
        self.process.join()


class RankGroupOfProcesses:
    """An arena, and ranks that are forked to run a function."""

    def __init__(self, num_ranks: int, *, timeout_s: float, spin_ns: int) -> None:
        self.memory = MemoryFile.create("tokamak-test-rank group", buffers_at(num_ranks) + BUFFER_BYTES)
        self.header = RankGroupHeader.begin(self.memory.buffer, num_ranks)
        self.num_ranks = num_ranks
        self._settings = {"timeout_s": timeout_s, "spin_ns": spin_ns}
        self._ranks: list[Rank] = []
        for rank in range(num_ranks):
            self.header.set_member(rank, True)

    def start(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Rank:
        """Start `function(communicator, ...)` in a process; the communicator has joined the present epoch."""
        answers, ours = _SERVER.Pipe()
        memory = (DupFd(self.memory.fd), self.memory.num_bytes)
        work = (rank, self.num_ranks, memory, self._settings, ours, function, arguments)
        process = _SERVER.Process(target=_run, args=work, daemon=True)
        process.start()
        ours.close()
        self._ranks.append(Rank(process, answers))
        return self._ranks[-1]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on all ranks; return their answers."""
        return [rank.answer() for rank in [self.start(rank, function, *arguments) for rank in range(self.num_ranks)]]

    def close(self) -> None:
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.kill()


def _run(
    rank: int,
    num_ranks: int,
    memory: tuple[Any, int],
    settings: dict[str, Any],
    answers: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    descriptor, num_bytes = memory
    try:
        arena = MemoryFile.from_fd(descriptor.detach(), num_bytes)
        communicator = Communicator(arena.buffer, rank, 0, num_ranks, **settings)
        assert communicator.join()
        answers.send(function(communicator, *arguments))
        with contextlib.suppress(EOFError):
            answers.recv()  # another rank may not have read this one's values yet
    except Exception as error:
        traceback.print_exc()
        answers.send((type(error).__name__, *error.args))


@contextlib.contextmanager
def rank_group_of(num_ranks: int, *, timeout_s: float = WATCHDOG_S, spin_ns: int = 5_000) -> Iterator[RankGroupOfProcesses]:
    rank_group = RankGroupOfProcesses(num_ranks, timeout_s=timeout_s, spin_ns=spin_ns)
    try:
        yield rank_group
    finally:
        rank_group.close()

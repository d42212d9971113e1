"""A rank's part in its rank group: collectives over the comm arena that the supervisor made (`shm/rank_group.py`).

Made by the worker, used by the runner and, as ops of a tape, by the native table (`ops/cpu/rank_group.py`). All members of the
group make the same calls in the same order. The death of a rank ends the call at once on all others (RankGroupBroken), and a
mismatched call is an error on all ranks that shows both calls.
"""

from __future__ import annotations

import numpy as np

from ops import _cpu
from ops.cpu.rank_group import ExpertRankGroup, RankGroup
from shm import rank_group as arena
from shm.rank_group import RankGroupHeader

RankGroupBroken = _cpu.RankGroupBroken  # args: text, the rank that is gone or came back, the present epoch
SPIN_NS = 40_000
_ALL = (1 << arena.MAX_RANKS) - 1

_OURS = {
    "line": arena.LINE,
    "ranks": arena.MAX_RANKS,
    "line_bytes": arena.LINE_BYTES,
    "bell": arena.BELL,
    "window": arena.WINDOW_BYTES,
    "groups": arena.NUM_GROUPS,
    "windows_at": arena.WINDOWS_AT,
}
assert _cpu.COMM_LAYOUT == _OURS, "shm/rank_group.py and ops/cpu/native/comm.h lay the comm arena out differently"


class Communicator:
    """Collectives of rank `rank` in the group of `count` ranks from `first` on. `spin_ns`: how long a wait spins before it
    sleeps; 0 if ranks have no cores of their own. `shares_experts`: the group has all ranks and continues without missing ones.
    `needs_all`: no rank is a member of an incomplete rank group. Raises RuntimeError if a peer did not come within `timeout_s`,
    or made another call."""

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        first: int,
        count: int,
        *,
        timeout_s: float,
        spin_ns: int = SPIN_NS,
        shares_experts: bool = False,
        needs_all: bool = False,
    ) -> None:
        self.header = RankGroupHeader(memory)
        self.rank = rank
        self.place = rank - first
        self.count = count
        self.memory = np.frombuffer(memory, np.uint8)
        self.members: tuple[int, ...] = ()
        self._shares_experts = shares_experts
        self._needs_all = needs_all
        self.native = _cpu.Comm(self.memory.ctypes.data, rank, first, count, spin_ns, int(timeout_s * 1e9), int(shares_experts))
        self.native.join(0, _ALL)  # no epoch: no rank meets another in it
        self._figures = 0, 0

    @property
    def epoch(self) -> int:
        """Return the epoch of the last join."""
        return self.native.epoch

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the rank group is in another epoch than this rank."""
        return self.header.epoch != self.epoch

    def join(self) -> bool:
        """Join the present epoch; return whether this rank is a member in it."""
        epoch, self.members = self.header.membership()
        self.native.join(epoch, sum(1 << member for member in self.members) if self._shares_experts else _ALL)
        return self.rank in self.members and (not self._needs_all or len(self.members) == self.header.num_ranks)

    @property
    def is_whole(self) -> bool:
        """Return whether all ranks of the group are members, in the epoch of the last join."""
        first = self.rank - self.place
        return set(range(first, first + self.count)) <= set(self.members)

    @property
    def places(self) -> tuple[int, ...]:
        """Return the places in the group that have values in the result of `all_gather`."""
        return self.members if self._shares_experts else tuple(range(self.count))

    def begin_step(self, step: int, versions: int = 0) -> None:
        """Label the next calls with this step and with `versions` that must be equal on all ranks."""
        self.native.begin_step(step, versions)

    def take_figures(self) -> tuple[int, int]:
        """Return the calls, and the nanoseconds waited in them, since the last call."""
        now = self.native.num_calls, self.native.waited_ns
        before, self._figures = self._figures, now
        return now[0] - before[0], now[1] - before[1]

    def rank_group(self, experts: ExpertRankGroup | None = None) -> RankGroup:
        """Return the rank group for the ops of a tape. The rest of the arena is divided among the groups that gather at the
        same time."""
        buffers = self.memory[arena.buffers_at(self.header.num_ranks) :]
        if experts is not None:
            buffers = buffers[: experts.windows.ctypes.data - buffers.ctypes.data]
        size = len(buffers) * self.count // self.header.num_ranks // arena.LINE * arena.LINE
        begin = size * ((self.rank - self.place) // self.count)
        return RankGroup(self.native, buffers[begin : begin + size], experts)

    # --------------------------------------------------------------------------------------------------- collectives

    def barrier(self) -> None:
        self.native.barrier()

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """[...] -> [count, ...], in rank order."""
        x = np.ascontiguousarray(x)
        y = np.empty((self.count, *x.shape), x.dtype)
        self.native.all_gather(y.ctypes.data, x.ctypes.data, x.nbytes)
        return y

    def all_reduce(self, x: np.ndarray, in_place: bool = False) -> np.ndarray:
        """Return the sum of all ranks' float32 x, added in rank order."""
        x = _floats(x)
        y = x if in_place else np.empty_like(x)
        self.native.all_reduce(y.ctypes.data, x.ctypes.data, x.size)
        return y

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:
        """float32 [count, ...] -> [...]: this rank's part of the sum, added in rank order."""
        x = _floats(x)
        assert len(x) == self.count, f"{len(x)} parts, expected {self.count}, one per rank"
        y = np.empty(x.shape[1:], np.float32)
        self.native.reduce_scatter(y.ctypes.data, x.ctypes.data, y.size)
        return y

    def broadcast(self, x: np.ndarray, root: int = 0) -> np.ndarray:
        """Return the array of the rank at place `root` of the group; on the others x gives the shape."""
        y = np.array(x, order="C")
        self.native.broadcast(y.ctypes.data, y.nbytes, root)
        return y

    def all_to_all(self, parts: list[np.ndarray], most: int) -> list[np.ndarray]:
        """Send `parts[i]` (uint8 [n]) to the rank at place i; return each rank's part for this one, in all at most `most` bytes
        (else ValueError, only on this rank)."""
        sent = np.array([part.nbytes for part in parts], np.int64)
        x = np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])
        y, received = np.empty(most, np.uint8), np.empty(self.count, np.int64)
        self.native.all_to_all(y.ctypes.data, most, received.ctypes.data, x.ctypes.data, sent.ctypes.data)
        ends = np.cumsum(received)
        return [y[end - size : end] for end, size in zip(ends.tolist(), received.tolist(), strict=True)]


def _floats(x: np.ndarray) -> np.ndarray:
    assert x.dtype == np.float32, f"sums of {x.dtype} are not supported"
    return np.ascontiguousarray(x)

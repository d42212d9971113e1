"""The comm arena of a rank group: the memory through which its ranks exchange tensors, as seen by the supervisor and readers.

A memfd that the supervisor holds and passes to the ranks. Its layout is defined in `ops/cpu/native/comm.h`;
`workers/rank_group` checks that this file agrees. Only the supervisor writes the header.

    0          LINE                            WINDOWS_AT
    +--------+-------------------------------+---------------------------+----------------------------------+
    | header | LINE_BYTES of each rank, twice| twice 2 windows of each   | buffers of gathers, of experts   |
    +--------+-------------------------------+---------------------------+----------------------------------+
      u64 epoch, members (a bit for each rank), clock (epoch << 40 | steps of the whole rank group begun in it), num_ranks
"""

from __future__ import annotations

from shm import _native

LINE = 128
MAX_RANKS = 64
LINE_BYTES = 2 * LINE
BELL = LINE  # in a rank's line: the word that the rank sleeps on
WINDOW_BYTES = 1 << 20
NUM_GROUPS = 2  # of a rank: those that share its matrices, and those that share the experts
WINDOWS_AT = LINE + NUM_GROUPS * MAX_RANKS * LINE_BYTES

CLOCK = 16
_EPOCH, _MEMBERS, _NUM_RANKS = 0, 8, 24
_EVERYBODY = 2**31 - 1
_EPOCH_SHIFT = 40


def buffers_at(num_ranks: int) -> int:
    """Return the offset of the gather buffers."""
    return WINDOWS_AT + NUM_GROUPS * 2 * WINDOW_BYTES * num_ranks


class RankGroupHeader:
    """Header in the arena's memory. Epoch 0: not begun."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    @staticmethod
    def begin(memory: memoryview, num_ranks: int) -> RankGroupHeader:
        """Begin epoch 1 without members; ranks become members when they are READY."""
        header = RankGroupHeader(memory)
        _native.store_u64(memory, _NUM_RANKS, num_ranks)
        _native.store_u64(memory, _EPOCH, 1)
        return header

    @property
    def epoch(self) -> int:
        return _native.load_u64(self.memory, _EPOCH)

    @property
    def num_ranks(self) -> int:
        return _native.load_u64(self.memory, _NUM_RANKS)

    @property
    def members(self) -> tuple[int, ...]:
        mask = _native.load_u64(self.memory, _MEMBERS)
        return tuple(rank for rank in range(MAX_RANKS) if mask >> rank & 1)

    def membership(self) -> tuple[int, tuple[int, ...]]:
        """Return the epoch and its members."""
        while True:
            epoch = self.epoch
            members = self.members
            if self.epoch == epoch:
                return epoch, members

    @property
    def clock(self) -> int:
        """The clock word, which changes with each begun step."""
        return _native.load_u64(self.memory, CLOCK)

    @staticmethod
    def num_begun(clock: int, epoch: int) -> int:
        """Return the number of steps of the whole rank group begun in this epoch, from the clock."""
        return clock & (1 << _EPOCH_SHIFT) - 1 if clock >> _EPOCH_SHIFT == epoch else 0

    def begin_next(self, epoch: int, num_done: int) -> bool:
        """Begin the step after the first `num_done` of the epoch. False if another rank did, or the epoch is over."""
        before = self.clock
        if before >> _EPOCH_SHIFT > epoch or self.num_begun(before, epoch) != num_done:
            return False
        return _native.compare_exchange_u64(self.memory, CLOCK, before, epoch << _EPOCH_SHIFT | num_done + 1)

    def set_member(self, rank: int, is_member: bool) -> None:
        """Begin a new epoch with or without `rank` and wake all ranks; no effect if membership is unchanged."""
        mask = _native.load_u64(self.memory, _MEMBERS)
        changed = mask | 1 << rank if is_member else mask & ~(1 << rank)
        if changed == mask:
            return
        _native.store_u64(self.memory, _MEMBERS, changed)
        _native.fetch_add_u64(self.memory, _EPOCH, 1)
        for other in (group * MAX_RANKS + rank for group in range(NUM_GROUPS) for rank in range(self.num_ranks)):
            bell = LINE + other * LINE_BYTES + BELL
            _native.fetch_add_u64(self.memory, bell, 1)
            _native.futex_wake(self.memory, bell, _EVERYBODY)

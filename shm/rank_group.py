"""The comm arena of a rank group: the memory that its ranks exchange tensors through, as the supervisor and its readers see it.

A memfd that the supervisor holds and passes to the ranks. Its layout is `ops/cpu/native/comm.h`'s; `workers/rank_group` says
that this page agrees. The supervisor alone writes the header.

    0          LINE                            WINDOWS_AT
    +--------+-------------------------------+---------------------------+----------------------------------+
    | header | LINE_BYTES of each rank, twice| twice 2 windows of each   | buffers of gathers, of experts   |
    +--------+-------------------------------+---------------------------+----------------------------------+
      u64 epoch, members (a bit for each rank), clock (epoch << 40 | steps of the whole rank group that were begun in it),
      num_ranks
"""

from __future__ import annotations

from shm import _native

LINE = 128
MAX_RANKS = 64
LINE_BYTES = 2 * LINE
BELL = LINE  # of a rank's line: the word that it sleeps on
WINDOW_BYTES = 1 << 20
NUM_GROUPS = 2  # that a rank may be in: with who shares its matrices, and with all who share the experts
WINDOWS_AT = LINE + NUM_GROUPS * MAX_RANKS * LINE_BYTES

CLOCK = 16
_EPOCH, _MEMBERS, _NUM_RANKS = 0, 8, 24
_EVERYBODY = 2**31 - 1
_EPOCH_SHIFT = 40


def buffers_at(num_ranks: int) -> int:
    """Return the offset of the gather buffers."""
    return WINDOWS_AT + NUM_GROUPS * 2 * WINDOW_BYTES * num_ranks


class RankGroupHeader:
    """Over the arena's memory. Epoch 0: it has not begun."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    @staticmethod
    def begin(memory: memoryview, num_ranks: int) -> RankGroupHeader:
        """Epoch 1, without members: they come when they are READY."""
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
        """The epoch, and who is a member in it."""
        while True:
            epoch = self.epoch
            members = self.members
            if self.epoch == epoch:
                return epoch, members

    @property
    def clock(self) -> int:
        """The word, which changes with each step that is begun."""
        return _native.load_u64(self.memory, CLOCK)

    @staticmethod
    def num_begun(clock: int, epoch: int) -> int:
        """Steps of the whole rank group that were begun in this epoch, as the clock shows them."""
        return clock & (1 << _EPOCH_SHIFT) - 1 if clock >> _EPOCH_SHIFT == epoch else 0

    def begin_next(self, epoch: int, num_done: int) -> bool:
        """Begin the step after the first `num_done` of the epoch. False: another rank did, or the epoch is over."""
        before = self.clock
        if before >> _EPOCH_SHIFT > epoch or self.num_begun(before, epoch) != num_done:
            return False
        return _native.compare_exchange_u64(self.memory, CLOCK, before, epoch << _EPOCH_SHIFT | num_done + 1)

    def set_member(self, rank: int, is_member: bool) -> None:
        """A new epoch, with or without `rank`, and everybody woken; nothing where that is so already."""
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

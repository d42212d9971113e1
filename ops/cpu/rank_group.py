"""Rank groups for the executors of the native table: ranks that share columns of matrices, and ranks that share experts."""

from __future__ import annotations

import msgspec
import numpy as np

from ops import _cpu


class ExpertRankGroup(msgspec.Struct, frozen=True):
    """Ranks that share the experts. `windows`: uint8 memory mapped by all of them, with room for `max_rows` rows of each
    (native/ops.h, ExpertWindows). The `num_ranks` ranks from `first_rank` on have the same rows as this one."""

    comm: _cpu.Comm
    windows: np.ndarray
    max_rows: int
    first_rank: int
    num_ranks: int


class RankGroup(msgspec.Struct, frozen=True):
    """Ranks that share the columns of matrices. `buffers`: uint8 memory mapped by all of them, for gathered arrays. Two halves
    alternate: an array in one can be read until this rank's next gather; the half is reused only after that."""

    comm: _cpu.Comm
    buffers: np.ndarray
    experts: ExpertRankGroup | None = None

    def half(self, turn: int, num_bytes: int) -> np.ndarray:
        """Return float32 memory, aligned to a cache line, in the half of this turn."""
        begin = turn % 2 * (len(self.buffers) // 2 // 64 * 64)
        assert num_bytes <= len(self.buffers) // 2, f"{num_bytes} bytes exceed a half of {len(self.buffers)}"
        return self.buffers[begin : begin + num_bytes].view(np.float32)

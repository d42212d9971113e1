"""The ranks that share the columns of a model's matrices, as the native table's executors see them."""

from __future__ import annotations

import msgspec
import numpy as np

from ops import _cpu


class ExpertRankGroup(msgspec.Struct, frozen=True):
    """The ranks that share the experts. `windows`: uint8, memory that all of them have mapped, where `max_rows` rows of each
    have room (native/ops.h, ExpertWindows). The `num_ranks` ranks from `first_rank` on have the same rows as this one."""

    comm: _cpu.Comm
    windows: np.ndarray
    max_rows: int
    first_rank: int
    num_ranks: int


class RankGroup(msgspec.Struct, frozen=True):
    """`buffers`: uint8, memory that all of them have mapped, for gathered arrays. Two halves take turns: an array in one may be
    read until this rank comes to the next gather; the half is written again after that one alone."""

    comm: _cpu.Comm
    buffers: np.ndarray
    experts: ExpertRankGroup | None = None

    def half(self, turn: int, num_bytes: int) -> np.ndarray:
        """float32 memory at a cache line, of the turn's half."""
        begin = turn % 2 * (len(self.buffers) // 2 // 64 * 64)
        assert num_bytes <= len(self.buffers) // 2, f"{num_bytes} bytes exceed a half of {len(self.buffers)}"
        return self.buffers[begin : begin + num_bytes].view(np.float32)

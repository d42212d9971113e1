"""The last call that a rank announced to its group, read from the comm arena (`ops/cpu/native/comm.h` has the layout)."""

from __future__ import annotations

from typing import NamedTuple

from shm import _native
from shm.rank_group import LINE, LINE_BYTES, RankGroupHeader


class Call(NamedTuple):
    sequence: int
    step: int


def last_call(header: RankGroupHeader, rank: int) -> Call:
    """Return the last announced call; may be torn while the rank continues."""
    line = LINE + rank * LINE_BYTES
    sequence = _native.load_u64(header.memory, line) & (1 << 40) - 1
    return Call(sequence, _native.load_u64(header.memory, line + 16 + 32 * (sequence % 2)))

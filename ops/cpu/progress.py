"""Progress of native ops: a word of shared memory that is set to CLOCK_MONOTONIC after each op, and after each task of a long
one. The worker places it in the heartbeat of its row in the counters file.
"""

from __future__ import annotations

import numpy as np

from ops import _cpu
from ops.cpu.array import address_of

_word: np.ndarray | None = None  # keeps the memory while native code writes it


def report_progress_to(word: memoryview | None) -> None:
    """Set the eight bytes to write progress to; None: nowhere."""
    global _word
    array = None if word is None else np.frombuffer(word, np.uint64)
    _cpu.set_heartbeat(0 if array is None else address_of(array))
    _word = array

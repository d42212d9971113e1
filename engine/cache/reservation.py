"""Reserves the KV arena's memory in the background, so that a lack of memory is reported before the cache fills.

Run by the cache actor, which takes no part in requests. Reserving takes a second for every 3 GiB, so it begins when the engine
serves, works slice by slice, and pauses four times as long as a slice took: it uses a fifth of one core, and the start takes no
longer. Blocks that are not reserved yet work too: their pages are allocated when they are first written.

If memory is short it waits, reports that in the log and the error log, and continues when there is some. A slice is reserved
only while a margin remains for other processes, since the kernel kills a process when memory runs out. Reserved memory cannot
run out; other memory may end a worker at its first write, as without reservation. The scheduler does not limit itself to
reserved memory: a block's pages are spread over the arena (one place per layer), and requests would be rejected for a shortage
that may never happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shm.counters import Cell
from shm.memory import available_memory_bytes
from shm.segment import MemoryFile
from shm.sizes import size_text

SLICE_BYTES = 8 << 20  # a few milliseconds
MARGIN_BYTES = 256 << 20  # left for other processes
REST_FACTOR = 4  # of the time of a slice
RETRY_NS = 1_000_000_000
_MIB = 1 << 20


class ArenaReservation:
    """The remaining work. `reserved` shows the progress, `say` reports problems to the operator."""

    def __init__(
        self,
        arena: MemoryFile,
        reserved: Cell,
        say: Callable[[str], None],
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        self._arena = arena
        self._reserved = reserved
        self._say = say
        self._available_bytes = available_bytes
        self._num_done = 0
        self._is_short = False
        self._next_ns = 0
        self._reserved.set(0)

    @property
    def is_done(self) -> bool:
        return self._num_done >= self._arena.num_bytes

    @property
    def next_ns(self) -> int:
        """CLOCK_MONOTONIC time of the next slice."""
        return self._next_ns

    def advance(self) -> None:
        """Reserve the next slice if its time has come."""
        begin_ns = time.monotonic_ns()
        if self.is_done or begin_ns < self._next_ns:
            return
        num_bytes = min(SLICE_BYTES, self._arena.num_bytes - self._num_done)
        available = self._available_bytes()
        if available < num_bytes + MARGIN_BYTES or not self._arena.reserve(self._num_done, num_bytes):
            self._tell_shortage(available)
            self._next_ns = begin_ns + RETRY_NS
            return
        self._num_done += num_bytes
        self._reserved.set(self._num_done)
        self._is_short = False
        end_ns = time.monotonic_ns()
        self._next_ns = end_ns + REST_FACTOR * (end_ns - begin_ns)

    def _tell_shortage(self, available: int) -> None:
        if not self._is_short:
            self._is_short = True
            self._say(
                f"memory for the KV cache is running out: {size_text(self._num_done)} of {size_text(self._arena.num_bytes)} "
                f"reserved, {size_text(available)} available, {size_text(MARGIN_BYTES)} of it kept free for other processes; "
                "free memory, or restart with a smaller --kv-cache-memory, before a worker is killed"
            )

"""Threads of a rank that work on grammars, and the matching that they use. Owned by `grammars.py`.

Cheap masks come first, by the time of their last one, and those of the source with the least time used (`fair_thread.py`). A
second thread makes masks that take more than `limits.SLOW_NS`, a third compiles grammars ahead of their sequences. Threads and
matching are created with the first grammar.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from workers.extensions.grammars.constraint import Constraint
from workers.extensions.grammars.fair_thread import FairThread

if TYPE_CHECKING:
    from engine.grammars.matching import Matching

_NICE = 5  # of the compiling thread
_STACK_BYTES = 32 << 20  # more than the tokenizer had for the same grammar


def _thread(name: str, begin: Callable[[], object] = lambda: None) -> ThreadPoolExecutor:
    """Start a thread with the stack size that grammars need."""
    before = threading.stack_size(_STACK_BYTES)
    made = ThreadPoolExecutor(1, name)
    made.submit(begin)
    threading.stack_size(before)
    return made


class HelperThreads:
    """Helper threads. `make_matching` is called once, by the thread that needs it first."""

    def __init__(self, make_matching: Callable[[], Matching]) -> None:
        self._make_matching = make_matching
        self._matching: Matching | None = None
        self._making = threading.Lock()
        self._threads: dict[bool, FairThread] = {}  # by whether they are for slow constraints
        self._compiler: ThreadPoolExecutor | None = None
        self._compiled: deque[int] = deque()  # numbers not taken yet
        self.num_compiling = 0

    @property
    def matching(self) -> Matching:
        with self._making:
            if self._matching is None:
                self._matching = self._make_matching()
            return self._matching

    def compile(self, number: int, grammar: str) -> None:
        """Compile `grammar` before its sequence comes, in a low-priority thread."""
        if self._compiler is None:
            self._compiler = _thread("grammars", lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE))
        self.num_compiling += 1
        self._compiler.submit(self._compile, number, grammar)

    def take_compiled(self) -> list[int]:
        """Return the numbers of the grammars compiled since the last call."""
        found = []
        while self._compiled:
            found.append(self._compiled.popleft())
        self.num_compiling -= len(found)
        return found

    def _compile(self, number: int, grammar: str) -> None:
        try:
            self.matching.prepare(grammar)
        finally:  # its sequences report an invalid grammar
            self._compiled.append(number)

    def submit(
        self, constraints: Sequence[Constraint], work: Callable[[Matching, int], None], *, is_ahead: bool = False
    ) -> None:
        """Submit `work` on each constraint, by its index, after all earlier work of its source."""
        for place in sorted(range(len(constraints)), key=lambda place: constraints[place].last_ns):
            constraint = constraints[place]
            thread = self._threads.get(constraint.is_slow)
            if thread is None:
                thread = FairThread(_thread("slow constraints" if constraint.is_slow else "constraints"))
                self._threads[constraint.is_slow] = thread
            constraint.pending = thread.submit(constraint.source, partial(self._do, constraint, place, work, is_ahead))

    def _do(self, constraint: Constraint, index: int, work: Callable[[Matching, int], None], is_ahead: bool) -> None:
        matching = self.matching
        constraint.prepare(matching)
        begin_ns = time.thread_time_ns()
        work(matching, index)
        constraint.spent(time.thread_time_ns() - begin_ns, is_ahead=is_ahead)

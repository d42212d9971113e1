"""Thread that works for several sources: the source with the least time used comes next.

Used by `helper_threads.py`. Work of one source is done in order of submission. An idle source does not accumulate time
(start-time fair queueing: Goyal, Vin and Cheng, 1996).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Work = Callable[[], None]


class FairThread:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        """`pool`: with a single thread."""
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[None], Work]]] = {}  # by source
        self._used_ns: dict[str, int] = {}  # processor time by source
        self._floor_ns = 0  # time of the running source when its work began

    def submit(self, source: str, work: Work) -> Future[None]:
        future = Future[None]()
        with self._lock:
            if source not in self._waiting:
                self._waiting[source] = deque()
                self._used_ns[source] = max(self._used_ns.get(source, 0), self._floor_ns)
            self._waiting[source].append((future, work))
        self._pool.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            source = min(self._waiting, key=self._used_ns.__getitem__)
            future, work = self._waiting[source].popleft()
            self._floor_ns = self._used_ns[source]
        begin_ns = time.thread_time_ns()
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._used_ns[source] += time.thread_time_ns() - begin_ns
            if not self._waiting[source]:
                del self._waiting[source]
                for name in self._used_ns.keys() - self._waiting.keys():
                    if self._used_ns[name] <= self._floor_ns:
                        del self._used_ns[name]
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

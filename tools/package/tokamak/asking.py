"""Concurrent requests with answers in order. The number in flight and the distance ahead of the consumer are bounded.

Used by `llm.py` and by `tokamak run-batch`. Uses only threads, so that it works where an event loop is running, as in a
notebook.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from tokamak.connection import Reply, Server

Q = TypeVar("Q")
A = TypeVar("A")

MAX_CONCURRENCY = 256
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 5.0
_BUSY = 429
_AWAY = (502, 503, 504)


class LostError(RuntimeError):
    """The server is gone for good."""


class Asker:
    """Sends requests until each is answered: waits while the server is full (429), and retries while it is away, for example
    while its HTTP process restarts. `is_there`: whether it may still come back."""

    def __init__(self, server: Server, is_there: Callable[[], bool], patience_s: float) -> None:
        self.server = server
        self._is_there = is_there
        self._patience_s = patience_s
        self._heard_s = 0.0  # monotonic time of the last answer to any request
        self._is_cancelled = threading.Event()

    def ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Return the answer, including errors. LostError if there is none, or `cancel` was called."""
        wait_s, begun_s = _FIRST_WAIT_S, time.monotonic()
        while True:
            reply, cause = None, ""
            try:
                reply = self.server.send(method, path, body)
            except OSError as error:
                cause = str(error) or type(error).__name__
            if self._is_cancelled.is_set():
                raise LostError("cancelled")
            if reply is not None and reply.status not in (_BUSY, *_AWAY):
                self._heard_s = time.monotonic()
                return reply
            if reply is None or reply.status != _BUSY:
                cause = cause or f"it answers {reply.status if reply else 0}"
                self._check_patience(begun_s, cause)
            asked_s = reply.retry_after_s if reply is not None else None
            if self._is_cancelled.wait(min(wait_s if asked_s is None else asked_s, 60.0)):
                raise LostError("cancelled")
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def cancel(self) -> None:
        """Cancel all requests for good: waiting callers get LostError."""
        self._is_cancelled.set()
        self.server.close()

    def _check_patience(self, begun_s: float, cause: str) -> None:
        silent_s = time.monotonic() - max(begun_s, self._heard_s)
        if silent_s > self._patience_s or not self._is_there():
            raise LostError(f"{self.server.url} does not answer any more: {cause}")


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class InOrder(Generic[Q, A]):
    """Yield the answers to `questions` in order. `answer` runs in `concurrency` threads, at most `ahead` questions before the
    answer that is consumed. The first failure ends all."""

    def __init__(
        self,
        questions: Iterable[Q],
        answer: Callable[[Q], A],
        concurrency: int,
        ahead: int,
        on_answer: Callable[[int, A], None] = lambda index, answer: None,
    ) -> None:
        """`on_answer`: called with each answer as it comes, one at a time."""
        self._questions = enumerate(questions)
        self._answer = answer
        self._on_answer = on_answer
        self._ahead = max(ahead, concurrency)
        self._answers: dict[int, A] = {}
        self._failure: _Failure | None = None
        self._num_taken = 0
        self._num_asked = 0
        self._is_over = False  # no more questions
        self._is_stopped = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)]

    def __iter__(self) -> Iterator[A]:
        for thread in self._threads:
            thread.start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_next)
                    if self._failure is not None:
                        raise self._failure.error
                    if self._num_taken not in self._answers:
                        return
                    answer = self._answers.pop(self._num_taken)
                    self._num_taken += 1
                    self._changed.notify_all()
                yield answer
        finally:
            self._stop()

    def _has_next(self) -> bool:
        is_end = self._is_over and self._num_taken == self._num_asked
        return self._failure is not None or self._num_taken in self._answers or is_end

    def _stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _next(self) -> tuple[int, Q] | None:
        """Return the next question and its number, once it may be sent; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._num_asked < self._num_taken + self._ahead)
            if self._is_stopped or self._is_over:
                return None
            found = next(self._questions, None)
            if found is None:
                self._is_over = True
                self._changed.notify_all()
                return None
            self._num_asked += 1
            return found

    def _work(self) -> None:
        try:
            while (question := self._next()) is not None:
                index, asked = question
                answer = self._answer(asked)
                with self._changed:
                    if self._is_stopped:
                        return
                    self._on_answer(index, answer)
                    self._answers[index] = answer
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or _Failure(error)
                self._is_stopped = True
                self._changed.notify_all()

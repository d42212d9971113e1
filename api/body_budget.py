"""How many bytes of request bodies one api process holds, of all connections together.

Each body has a limit of its own; a thousand connections at that limit would still fill the machine. So large bodies share a
budget while they are read and decoded. Small ones, as nearly all are, take nothing of it and are never refused for it.
"""

from __future__ import annotations

from types import TracebackType

from engine.errors import RequestError

FREE_BYTES = 64 << 10  # of each body
LARGEST_BODIES = 8  # that may be held at once


class BodyBudget:
    def __init__(self, max_body_bytes: int) -> None:
        self._limit = LARGEST_BODIES * max_body_bytes
        self._num_bytes = 0

    def share(self) -> BodyShare:
        return BodyShare(self)

    def change(self, num_bytes: int) -> None:
        """Take bytes, or give them back. RequestError (503) where there are not so many left."""
        if self._num_bytes + num_bytes > self._limit:
            raise RequestError(
                f"the server holds {self._num_bytes} bytes of large request bodies, the limit is {self._limit}; try again",
                status=503,
                code="unavailable",
                retry_after_s=1,
            )
        self._num_bytes += num_bytes


class BodyShare:
    """What one body takes, until the block ends."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_taken = 0

    def grow_to(self, num_bytes: int) -> None:
        more = max(num_bytes - FREE_BYTES, 0) - self._num_taken
        self._budget.change(more)
        self._num_taken += more

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._budget.change(-self._num_taken)

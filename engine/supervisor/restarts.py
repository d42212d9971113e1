"""Limits on deaths of an actor, and delays of its next start: pure bookkeeping of the supervisor.

A child that died is restarted at once, because open streams wait for it. If it dies again soon, or cannot be started (no
process, descriptor or space left), the delay before the next attempt doubles each time; too many deaths within the window end
the engine.
"""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
HEALTHY_S = 10.0  # an actor that was ready for this long has recovered


class RestartTable:
    """Deaths of each actor within a sliding window, and attempts to start it since it was healthy."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._deaths: dict[str, deque[float]] = {}
        self._num_attempts: dict[str, int] = {}

    def record_death(self, actor: str, now_s: float) -> bool:
        """Record a death at `now_s` (monotonic seconds). Return whether the actor may be restarted: not from the `limit`-th
        death within [now_s - window_s, now_s] on."""
        deaths = self._deaths.setdefault(actor, deque())
        deaths.append(now_s)
        while deaths[0] < now_s - self.window_s:
            deaths.popleft()
        return len(deaths) < self.limit

    def next_delay_s(self, actor: str) -> float:
        """Return the seconds to wait before the next attempt to start `actor`: 0 at first."""
        num_attempts = self._num_attempts.get(actor, 0)
        self._num_attempts[actor] = num_attempts + 1
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(num_attempts - 1, 30)) if num_attempts else 0.0

    def forget_attempts(self, actor: str) -> None:
        """Forget earlier attempts: the actor recovered, or an operator restarts it."""
        self._num_attempts.pop(actor, None)

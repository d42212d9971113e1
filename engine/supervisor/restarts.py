"""How often an actor may die: pure bookkeeping of the supervisor.

A child is started again at once, without back-off, because open streams wait for it; what keeps a child that cannot live from
being started for ever is the intensity limit alone.
"""

from __future__ import annotations

from collections import deque


class RestartTable:
    """Deaths of each actor within a sliding window."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._deaths: dict[str, deque[float]] = {}

    def record_death(self, actor: str, now_s: float) -> bool:
        """Note a death at `now_s` (monotonic seconds). Whether the actor may be started again: False from the `limit`-th death
        within [now_s - window_s, now_s] on."""
        deaths = self._deaths.setdefault(actor, deque())
        deaths.append(now_s)
        while deaths[0] < now_s - self.window_s:
            deaths.popleft()
        return len(deaths) < self.limit

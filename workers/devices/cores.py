"""Which cores a rank's threads stay on. Pure; called by the runner's device.

A thread that is bound to a core loses it to whoever else runs there, and cannot go on elsewhere. So threads are bound only
where cores are left for the other actors, and only within cores that are this engine's: its affinity was narrowed (taskset, a
container's cpuset), or its ranks must not run on each other's. On two busy cores, two bound threads took 1.2 times as long
for a decode step of 16 as two free ones (medians of 24 alternating runs).
"""

from __future__ import annotations

from collections.abc import Collection


def rank_cores(rank: int, num_ranks: int, num_threads: int, allowed: Collection[int], num_cores: int) -> list[int]:
    """A core for each of the rank's threads, out of those that the process may use, of `num_cores` in the machine; none where
    its threads are better left free."""
    has_spare = num_ranks * num_threads < len(allowed)
    is_ours = num_ranks > 1 or len(allowed) < num_cores
    if not (has_spare and is_ours):
        return []
    return sorted(allowed)[rank * num_threads : (rank + 1) * num_threads]

"""The restart table and the decision about hangs, as functions of time."""

from __future__ import annotations

from engine.supervisor.hangs import HangAction, HangWatch
from engine.supervisor.restarts import MAX_DELAY_S, RestartTable

SECOND = 1_000_000_000
TENTH = SECOND // 10


def test_third_death_within_the_window_ends_the_engine() -> None:
    table = RestartTable(limit=3, window_s=300)
    assert table.record_death("worker0", 0)
    assert table.record_death("worker0", 100)
    assert table.record_death("scheduler", 150)
    assert not table.record_death("worker0", 299)


def test_deaths_leave_the_window() -> None:
    table = RestartTable(limit=3, window_s=300)
    assert all(table.record_death("worker0", 151 * number) for number in range(100))


def test_limit_of_one_restarts_nothing() -> None:
    assert not RestartTable(limit=1, window_s=300).record_death("worker0", 5)


def test_repeated_failures_delay_starts_longer() -> None:
    table = RestartTable(limit=3, window_s=300)
    delays = [table.next_delay_s("worker0") for _ in range(100)]
    assert delays[:5] == [0, 0.1, 0.2, 0.4, 0.8]
    assert set(delays[8:]) == {MAX_DELAY_S}
    assert table.next_delay_s("scheduler") == 0
    table.forget_attempts("worker0")
    assert table.next_delay_s("worker0") == 0


def actions(watch: HangWatch, start_ns: int, num_looks: int, limit_ns: int = SECOND) -> list[tuple[float, HangAction]]:
    """Return the actions and their times in seconds while the heartbeat is still and the supervisor looks every 100 ms."""
    done = []
    for look in range(1, num_looks + 1):
        action = watch.look(start_ns + look * TENTH, 7, limit_ns)
        if action is not HangAction.NONE:
            done.append((look / 10, action))
    return done


def test_hung_actor_is_dumped_terminated_then_killed() -> None:
    watch = HangWatch(0)
    watch.look(0, 7, SECOND)
    assert actions(watch, 0, 100) == [(1.1, HangAction.DUMP), (1.6, HangAction.TERMINATE), (3.6, HangAction.KILL)]


def test_a_heartbeat_that_moves_is_left_alone() -> None:
    watch = HangWatch(0)
    assert all(watch.look(look * TENTH, look, SECOND) is HangAction.NONE for look in range(1000))


def test_recovered_child_gets_its_whole_limit() -> None:
    watch = HangWatch(0)
    watch.look(0, 7, SECOND)
    assert actions(watch, 0, 12) == [(1.1, HangAction.DUMP)]
    assert watch.look(13 * TENTH, 8, SECOND) is HangAction.NONE
    watch.look(14 * TENTH, 7, SECOND)
    assert actions(watch, 14 * TENTH, 11) == [(1.1, HangAction.DUMP)]


def test_pause_of_the_supervisor_is_no_hang() -> None:
    watch = HangWatch(0)
    watch.look(0, 7, 60 * SECOND)
    assert watch.look(3600 * SECOND, 7, 60 * SECOND) is HangAction.NONE
    assert watch.look(3601 * SECOND, 8, 60 * SECOND) is HangAction.NONE

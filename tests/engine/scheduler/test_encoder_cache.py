"""The encoder cache against a plain model: an array with the owner of each row."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.encoder_cache import CachedUnit, EncoderCache, RowRuns, UnitState


def encoded(cache: EncoderCache, name: bytes, num_rows: int) -> CachedUnit | None:
    unit = cache.begin(name, num_rows, cache.evictable())
    if unit is not None:
        unit.state = UnitState.CONFIRMED
    return unit


def test_an_empty_cache_fills() -> None:
    cache = EncoderCache(8)
    assert len(cache) == 0
    assert not cache.is_readable(b"a")
    assert encoded(cache, b"a", 8) is not None
    assert cache.is_readable(b"a")
    assert cache.num_used_rows == 8


def test_least_recently_used_is_evicted_first() -> None:
    cache = EncoderCache(9)
    units = [encoded(cache, name, 3) for name in (b"a", b"b", b"c")]
    assert units[0] is not None
    cache.use([units[0]])
    cache.unuse([units[0]])
    assert encoded(cache, b"d", 3) is not None
    assert {unit.unit_hash for unit in cache} == {b"a", b"c", b"d"}
    assert cache.num_evictions == 1


def test_only_units_in_the_way_are_evicted() -> None:
    cache = EncoderCache(6)
    for name, num_rows in ((b"a", 1), (b"b", 2), (b"c", 1), (b"d", 2)):
        encoded(cache, name, num_rows)
    assert encoded(cache, b"e", 3) is not None  # `a` and `b` make a run of three
    assert {unit.unit_hash for unit in cache} == {b"c", b"d", b"e"}


def test_nothing_is_evicted_in_vain() -> None:
    cache = EncoderCache(6)
    kept = encoded(cache, b"a", 2)
    encoded(cache, b"b", 4)
    assert kept is not None
    cache.use([kept])
    assert encoded(cache, b"c", 5) is None
    assert (len(cache), cache.num_evictions) == (2, 0)


def test_rows_in_use_are_not_reused() -> None:
    cache = EncoderCache(4)
    unit = encoded(cache, b"a", 4)
    assert unit is not None
    cache.use([unit])
    cache.use([unit])
    cache.forget(unit)
    assert cache.get(b"a") is None
    assert encoded(cache, b"b", 4) is None
    cache.unuse([unit])
    assert encoded(cache, b"b", 4) is None
    cache.unuse([unit])
    assert encoded(cache, b"b", 4) is not None


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 24), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(0, 9)), max_size=60))
def test_against_an_array_of_rows(num_rows: int, actions: list[tuple[int, int, int]]) -> None:
    """Rows have one owner each; a refused unit would not fit even without all units that can be removed."""
    cache = EncoderCache(num_rows)
    known: list[CachedUnit] = []
    used: list[CachedUnit] = []
    for kind, size, choice in actions:
        unit = known[choice % len(known)] if known else None
        name = bytes([choice])
        if kind <= 1 and cache.get(name) is None:
            fixed = {row for unit in known if not unit.can_go for row in range(unit.first_row, unit.end_row)}
            has_room = any(fixed.isdisjoint(range(row, row + size)) for row in range(num_rows - size + 1))
            found = cache.begin(name, size, cache.evictable())
            assert (found is not None) == has_room
            known += [found] if found is not None else []
        elif kind == 2 and unit is not None and unit.state is not UnitState.FORGOTTEN:
            unit.state = UnitState.CONFIRMED
        elif kind == 3 and unit is not None and unit.state is not UnitState.FORGOTTEN:
            cache.use([unit])
            used.append(unit)
        elif kind == 4 and used:
            cache.unuse([used.pop(choice % len(used))])
        elif kind == 5 and unit is not None:
            cache.forget(unit)
        known = [unit for unit in known if unit.state is not UnitState.FORGOTTEN or unit.num_users]
        rows = [row for unit in known for row in range(unit.first_row, unit.end_row)]
        assert len(rows) == len(set(rows)) == cache.num_used_rows <= num_rows
        assert {unit.unit_hash for unit in cache} == {u.unit_hash for u in known if u.state is not UnitState.FORGOTTEN}
    cache.clear()
    for unit in list(used):
        cache.unuse([unit])
    assert cache.num_used_rows == len(cache) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_runs_never_touch(actions: list[tuple[bool, int]]) -> None:
    runs, taken = RowRuns(30), list[tuple[int, int]]()
    for takes, size in actions:
        if takes:
            start = runs.best(size)
            free = sorted(runs)
            assert (start is None) == all(end - start < size for start, end in free)
            if start is not None:
                runs.take(start, start + size)
                taken.append((start, start + size))
        elif taken:
            runs.give(*taken.pop(size % len(taken)))
        free = sorted(runs)
        assert all(first[1] < second[0] for first, second in pairwise(free))
        assert {row for run in free for row in range(*run)} == set(range(30)) - {row for run in taken for row in range(*run)}
        assert runs.num_rows == sum(end - start for start, end in free)

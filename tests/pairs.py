"""Which cases of a test with several lists of parameters run by default: enough that any two values of different lists meet in
one of them. `--all-cases` runs every combination.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import gcd

import pytest

_STEP = 7919  # cases are tried in an order in which neighbours have little in common


def cover_pairs(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Return the indexes, ascending, of cases with every pair of values of two places that `cases` have."""
    pairs = [{*combinations(enumerate(case), 2)} for case in cases]
    order = _spread(len(cases))
    met: set[object] = set()
    chosen = []
    for num_new in range(max(map(len, pairs), default=0), 0, -1):  # those that bring the most come first
        for index in order:
            if len(pairs[index] - met) >= num_new:
                chosen.append(index)
                met |= pairs[index]
    return sorted(chosen)


def _spread(count: int) -> list[int]:
    step = next(step for step in range(_STEP, _STEP + count + 1) if gcd(step, count) == 1) if count else 1
    return [index * step % count for index in range(count)]


def pairwise(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items without the cases of tests with three lists or more in which no two values meet for the first time."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        values = [_values(case) for case in cases]
        if len(values[0]) > 2:
            left_out |= {*cases} - {cases[index] for index in cover_pairs(values)}
    return [item for item in items if item not in left_out]


def _values(item: pytest.Item) -> tuple[Hashable, ...]:
    """Return a case's value of each list. A row of a table of several parameters is one value; so is a fixture's. Where such a
    row has a fixture's parameter, each of its parameters is one (`tests/ops/tables.py`)."""
    if not hasattr(item, "callspec"):
        return ()
    left = {name: id(value) for name, value in item.callspec.params.items()}  # they come from lists, so ids tell them apart
    lists = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        values = tuple(left.pop(name) for name in names)
        lists += values if mark.kwargs.get("indirect") else [values]
    return (*lists, *left.values())

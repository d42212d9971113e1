"""Threads of ranks that are bound to memory nodes."""

from __future__ import annotations

import pytest

from engine.options.read import read_options
from engine.options.resolve_ranks import available_cores, resolve_threads


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "expected"), [(1, (9,), 9), (2, (6, 3), 3), (4, (8, 8), 4), (3, (4, 4), 2), (4, (1, 1), 1)]
)
def test_threads_fit_the_node_of_the_rank(
    num_ranks: int, sizes: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_cores() >= 1
    monkeypatch.setattr("engine.options.resolve_ranks.available_cores", lambda: sum(sizes))
    nodes = [tuple(range(size)) for size in sizes]
    options = read_options(["/none"], {})
    assert resolve_threads(options, num_ranks, nodes) == expected
    asked = read_options(["/none", "--threads", str(expected + 1)], {})
    assert resolve_threads(asked, num_ranks, nodes) == expected + 1
    assert bool(asked.notes) == (num_ranks > 1)

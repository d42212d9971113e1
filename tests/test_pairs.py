from __future__ import annotations

from itertools import combinations, product

from tests.pairs import cover_pairs


def pairs_of(cases: list[tuple[int, ...]]) -> set[object]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


def test_every_pair_of_values_stays() -> None:
    cases = [case for case in product(range(7), range(25), range(6), range(2)) if sum(case) % 5]
    chosen = [cases[index] for index in cover_pairs(cases)]
    assert pairs_of(chosen) == pairs_of(cases)
    assert 7 * 25 <= len(chosen) < 1.2 * 7 * 25


def test_case_without_a_new_pair_is_left_out() -> None:
    assert cover_pairs([(1, 1, 1), (1, 1, 1), (1, 1, 2)]) == [0, 2]
    assert cover_pairs([*product(range(3), range(4))]) == list(range(12))
    assert cover_pairs([]) == []

"""`thinking_token_budget` in the worker: the end of thinking is forced at the count, whatever was rolled back before."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from engine.grammars.formats import HEAD
from engine.grammars.matching import Matching
from engine.grammars.tokens import GrammarTokens
from engine.messages import Grammar, SamplingParams
from workers.extensions.grammars.constraint import Constraint

BEGIN, END, STOP = [256], [257, 258], 259
PIECES = [bytes([byte]) for byte in range(256)] + [b"<b>", b"<e", b">", b"</s>"]
MATCHING = Matching(GrammarTokens.of(PIECES, [256, 257], [], [STOP], len(PIECES)))
NUM_TOKENS = 260


def int32(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


def constraint_of(budget: int, text: str = "", is_thinking: bool = True, known: list[int] | None = None) -> Constraint:
    grammar = Grammar(text, int32(END), int32(BEGIN), budget)
    sampling = SamplingParams(grammar=grammar, is_thinking=is_thinking, stop_token_ids=[STOP])
    made = Constraint(sampling, 7, list(known or ()), np.zeros((3, -(-NUM_TOKENS // 32)), np.uint32))
    made.make(MATCHING)
    return made


def allowed(constraint: Constraint, place: int = 0) -> set[int]:
    bits = np.unpackbits(constraint.masks[place].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:NUM_TOKENS]).tolist())


def take(constraint: Constraint, *token_ids: int) -> None:
    constraint.take(MATCHING, constraint.position, list(token_ids))


ANY = set(range(NUM_TOKENS))


@pytest.mark.parametrize("is_thinking", [True, False])
def test_end_of_thinking_is_forced_at_the_budget(is_thinking: bool) -> None:
    constraint = constraint_of(2, is_thinking=is_thinking)
    if not is_thinking:
        take(constraint, *BEGIN)
    for expected in (ANY, ANY, {END[0]}, {END[1]}, ANY, ANY):
        assert allowed(constraint) == expected
        take(constraint, min(expected))


def test_answers_without_thinking_are_unconstrained() -> None:
    constraint = constraint_of(0, is_thinking=False)
    for token_id in (1, *BEGIN, 2):
        assert allowed(constraint) == ANY
        take(constraint, token_id)


def test_shorter_thinking_is_unconstrained() -> None:
    constraint = constraint_of(3)
    take(constraint, 1, *END)
    assert allowed(constraint) == ANY
    take(constraint, 1, 2, 3)
    assert allowed(constraint) == ANY


def test_grammar_applies_after_the_forced_end() -> None:
    constraint = constraint_of(1, text=HEAD + 'start: "ab"\n')
    take(constraint, 9)
    assert allowed(constraint) == {END[0]}
    take(constraint, *END)
    assert allowed(constraint) == {ord("a")}


def test_drafts_are_accepted_up_to_the_budget() -> None:
    constraint = constraint_of(2)
    assert constraint.num_allowed(MATCHING, [1, 2, 3]) == 2
    constraint.look_ahead(MATCHING, [1, 2])
    assert [allowed(constraint, place) for place in range(3)] == [ANY, ANY, {END[0]}]
    take(constraint, 1)
    assert allowed(constraint) == ANY
    take(constraint, 2, END[0])
    constraint.take(MATCHING, constraint.position - 2, [5])  # another token was sampled
    assert allowed(constraint) == {END[0]}


def test_restarted_worker_continues_the_budget() -> None:
    assert allowed(constraint_of(2, known=[1, 2, END[0]])) == {END[1]}
    assert allowed(constraint_of(2, known=[1, 2, *END])) == ANY

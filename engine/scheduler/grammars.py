"""Which grammars the ranks have compiled: a sequence whose grammar they lack waits in its place, and holds up nobody.

Used by the scheduler process alone. A rank that compiled a grammar when its sequence is drawn for the first time would keep all
that run beside it waiting, at its first grammar for as long as it takes the vocabulary in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from engine.messages import CompileGrammar
from engine.scheduler.sequence import Sequence

_NUMBER_BITS = 40
MAX_KNOWN = 32  # that were asked for last; a rank keeps twice as many


class _Asked(msgspec.Struct, eq=False):
    number: int
    ranks: set[int] = set()  # that have it
    sequences: list[Sequence] = []


class Grammars:
    def __init__(self, num_ranks: int, send: Callable[[CompileGrammar], None], epoch: int = 1) -> None:
        """`send`: to every rank. `epoch`: of the scheduler, whose numbers are its own."""
        self._num_ranks = num_ranks
        self._send = send
        self._known: dict[str, None] = {}  # oldest first
        self._asked: dict[str, _Asked] = {}
        self._last_number = epoch << _NUMBER_BITS

    def want(self, sequence: Sequence) -> None:
        """Have it wait until the ranks have its grammar, if it has one."""
        grammar = sequence.request.sampling.grammar
        if grammar is None or not grammar.text:
            return
        if grammar.text in self._known:
            del self._known[grammar.text]
            self._known[grammar.text] = None
            return
        sequence.awaits_grammar = True
        asked = self._asked.get(grammar.text)
        if asked is not None:
            asked.sequences.append(sequence)
            return
        self._last_number += 1
        self._asked[grammar.text] = _Asked(self._last_number, sequences=[sequence])
        self._send(CompileGrammar(self._last_number, grammar.text))

    def compiled(self, number: int, rank: int) -> None:
        """A rank has one of them."""
        text = next((text for text, asked in self._asked.items() if asked.number == number), None)
        if text is None:
            return
        asked = self._asked[text]
        asked.ranks.add(rank)
        if len(asked.ranks) < self._num_ranks:
            return
        del self._asked[text]
        for sequence in asked.sequences:
            sequence.awaits_grammar = False
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[text] = None

    def rank_restarted(self, waiting: Iterable[Sequence]) -> None:
        """It has none of them, and knows of no question."""
        self._known.clear()
        for sequence in waiting:
            if not sequence.awaits_grammar:
                self.want(sequence)

    def ask_again(self) -> None:
        """What was on its way to the ranks may be lost."""
        for text, asked in self._asked.items():
            asked.ranks.clear()
            self._send(CompileGrammar(asked.number, text))

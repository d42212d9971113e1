"""Grammars that the ranks have compiled: a sequence with a grammar that is not compiled yet waits without delaying others.

Used by the scheduler process alone. If a rank compiled a grammar at the sequence's first token, all other sequences of the
batch would wait, at the first grammar until the vocabulary is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import msgspec

from engine.messages import CompileGrammar
from engine.scheduler.sequence import Sequence

_NUMBER_BITS = 40
MAX_KNOWN = 32  # last used grammars that are remembered; a rank keeps twice as many
MAX_ASKED = 8  # requested at a time: fewer than are known, so that none is forgotten before its sequence has a slot
MAX_SEEN = 64  # waiting sequences looked at for each step


class _Asked(msgspec.Struct, eq=False):
    number: int
    ranks: set[int] = set()  # ranks that have compiled it


def _text_of(sequence: Sequence) -> str:
    """Return the grammar of the sequence; empty if it has none."""
    grammar = sequence.request.sampling.grammar
    return "" if grammar is None else grammar.text


class Grammars:
    def __init__(self, num_ranks: int, send: Callable[[CompileGrammar], None], epoch: int = 1) -> None:
        """`send` sends to every rank. `epoch`: the scheduler's, each life numbers its grammars."""
        self._num_ranks = num_ranks
        self._send = send
        self._known: dict[str, None] = {}  # oldest first
        self._asked: dict[str, _Asked] = {}
        self._last_number = epoch << _NUMBER_BITS
        self._is_used = False

    def want(self, sequence: Sequence) -> None:
        """Make the sequence wait until the ranks have its grammar, if it has one."""
        text = _text_of(sequence)
        self._is_used = self._is_used or bool(text)
        sequence.awaits_grammar = bool(text) and not self._is_known(text)

    def look_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Request the grammars of the next waiting sequences, a few at a time. A grammar requested too early would delay others
        (ranks compile one at a time), might be for a sequence that is aborted meanwhile, or be forgotten before it is used."""
        if not self._is_used:
            return
        for sequence in islice(waiting, MAX_SEEN):
            text = _text_of(sequence)
            if not text:
                continue
            sequence.awaits_grammar = not self._is_known(text)
            if sequence.awaits_grammar and text not in self._asked and len(self._asked) < MAX_ASKED:
                self._last_number += 1
                self._asked[text] = _Asked(self._last_number)
                self._send(CompileGrammar(self._last_number, text))

    def _is_known(self, text: str) -> bool:
        """Return whether the grammar is compiled, and mark it as recently used."""
        if text not in self._known:
            return False
        del self._known[text]
        self._known[text] = None
        return True

    def compiled(self, number: int, rank: int) -> None:
        """Note that a rank has compiled a grammar."""
        text = next((text for text, asked in self._asked.items() if asked.number == number), None)
        if text is None:
            return
        asked = self._asked[text]
        asked.ranks.add(rank)
        if len(asked.ranks) < self._num_ranks:
            return
        del self._asked[text]
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[text] = None

    def rank_restarted(self, waiting: Iterable[Sequence]) -> None:
        """Forget the compiled grammars: a rank was restarted without them."""
        self._known.clear()
        for sequence in waiting:
            self.want(sequence)

    def ask_again(self) -> None:
        """Send the requested grammars again, which ranks may have lost."""
        for text, asked in self._asked.items():
            asked.ranks.clear()
            self._send(CompileGrammar(asked.number, text))

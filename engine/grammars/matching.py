"""Matchers for one vocabulary. The same limits apply when a grammar is checked and when it is used.

Used by the tokenizer's helpers and by the ranks' helper threads. The vocabulary is loaded with the first grammar.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from engine.grammars.matcher import Matcher, MatcherLimits, MatcherVocabulary
from engine.grammars.tokens import GrammarTokens

if TYPE_CHECKING:
    from engine.grammars.unique_keys import QuotingTokens

UNIQUE_KEYS = "// unique keys"  # note in a grammar: no object may have a key twice (`unique_keys.py`)
LIMITS = MatcherLimits(
    initial_lexer_fuel=1_000_000,  # for a grammar's lexer when it is built: some 20 ms
    step_lexer_fuel=50_000,  # for the lexer, per token: some 4 ms
    step_max_items=10_000,  # for the parser, per token: some 1 ms
    max_lexer_states=20_000,  # 1 to 2 KB each
    max_grammar_size=20_000,  # symbols
)
MAX_KEPT = 64  # matchers of the last used grammars


class Matching:
    """Creates matchers in any thread; each belongs to its thread."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._vocabulary: MatcherVocabulary | None = None
        self._quoting: QuotingTokens | None = None
        self._kept: dict[str, Matcher] = {}  # never advanced, so that a copy is a new one
        self._making = Lock()  # held while the vocabulary or a grammar is loaded
        self._keeping = Lock()  # for the order of `_kept`; never held while one is built

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher for an answer; `is_error` says whether the grammar is invalid."""
        return self._known(grammar).copy()

    def prepare(self, grammar: str) -> None:
        """Do the slow part of the first `matcher` call."""
        self._known(grammar)

    def error_of(self, grammar: str) -> str:
        """Return the error of a grammar; empty: none up to its first token."""
        matcher = self.matcher(grammar)
        if not matcher.is_error():
            matcher.mask()
        return matcher.error()

    def first_mask(self, grammar: str) -> bytes:
        """Return the tokens with which an answer may begin, one bit each, for a valid grammar."""
        return self.matcher(grammar).mask()

    def _known(self, grammar: str) -> Matcher:
        kept = self._kept_one(grammar)
        if kept is not None:
            return kept
        with self._making:
            kept = self._kept_one(grammar)  # built by another thread meanwhile
            if kept is not None:
                return kept
            if self._vocabulary is None:
                self._vocabulary = MatcherVocabulary(self.tokens)
            kept = self._made(self._vocabulary.matcher(grammar, LIMITS), grammar)
            with self._keeping:
                self._kept[grammar] = kept
                while len(self._kept) > MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
            return kept

    def _made(self, matcher: Matcher, grammar: str) -> Matcher:
        if UNIQUE_KEYS not in grammar or matcher.is_error():
            return matcher
        from engine.grammars.unique_keys import QuotingTokens, UniqueKeyMatcher

        if self._quoting is None:
            self._quoting = QuotingTokens(self.tokens)
        return UniqueKeyMatcher(matcher, self._quoting)

    def _kept_one(self, grammar: str) -> Matcher | None:
        """Return a kept matcher and mark it as recently used, as schedulers do."""
        with self._keeping:
            kept = self._kept.pop(grammar, None)
            if kept is not None:
                self._kept[grammar] = kept
            return kept

"""Matchers over one vocabulary, within limits: the same ones where a grammar is checked and where it is used.

Used by the tokenizer's helpers and by the ranks' helper threads; the only file that knows llguidance's tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.grammars.tokens import GrammarTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INITIAL_FUEL = 1_000_000  # of a grammar's lexer when it is made: some 20 ms
STEP_FUEL = 50_000  # of it for a token: some 4 ms
MAX_STEP_ITEMS = 10_000  # of the parser for a token: some 1 ms
MAX_LEXER_STATES = 20_000  # 1 to 2 KB each
MAX_GRAMMAR_SYMBOLS = 20_000
MAX_KEPT = 64  # matchers of grammars that were used last


class Matching:
    """Makes matchers. One thread at a time."""

    def __init__(self, tokens: GrammarTokens) -> None:
        import llguidance

        self.tokens = tokens
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        self._make = llguidance.LLMatcher
        self._tokenizer = _tokenizer_of(tokens)
        self._kept: dict[str, LLMatcher] = {}  # never moved on, so that a copy is as a new one

    def matcher(self, grammar: str) -> LLMatcher:
        """One for an answer; `is_error` says whether it is any."""
        kept = self._kept.pop(grammar, None)
        if kept is None:
            kept = self._make(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[grammar] = kept
        return kept.deep_copy()

    def error_of(self, grammar: str) -> str:
        """What is wrong with it; empty: nothing, up to its first token."""
        matcher = self.matcher(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()

    def first_mask(self, grammar: str) -> bytes:
        """The tokens that an answer may begin with, a bit each, of a grammar that is right."""
        return bytes(self.matcher(grammar).compute_bitmask())


def _tokenizer_of(tokens: GrammarTokens) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Words(tokens)), n_vocab=len(tokens.tokens), eos_token=tokens.end_ids or None)


class _Words:
    """As `TokenizerWrapper` wants them."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens.tokens
        self.special_token_ids = tokens.special_ids
        self.eos_token_id = tokens.end_ids[0] if tokens.end_ids else None
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Never asked for a grammar's texts, whose tokens the model chooses itself (`no_forcing`)."""
        return []

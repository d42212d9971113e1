"""Turns formats of answers into grammars, compiled once by llguidance within its limits before they are sent.

Used only in the tokenizer's helper processes: a format that takes too long or too much memory ends the helper, and other
requests' text is in other lanes. Nothing is imported or built before a request has a format.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.grammars.tokens import GrammarTokens, MakeTokens
from engine.messages import AnswerFormat, Grammar, SamplingParams

if TYPE_CHECKING:
    from engine.grammars.matching import Matching


class AnswerFormats:
    """`make_tokens` gives the vocabulary that is written to `path` for the ranks. `end_of_thinking`, `begin_of_thinking`: token
    ids (int32); empty: the model does not reason."""

    def __init__(
        self,
        make_tokens: MakeTokens,
        path: Path,
        max_bytes: int,
        end_of_thinking: bytes = b"",
        begin_of_thinking: bytes = b"",
    ) -> None:
        self._make_tokens = make_tokens
        self._path = path
        self._max_bytes = max_bytes
        self._end_of_thinking = end_of_thinking
        self._begin_of_thinking = begin_of_thinking
        self._matching: Matching | None = None
        self._marks: dict[str, int] = {}  # of the vocabulary: finding them among all tokens takes as long as compiling

    def write_vocabulary(self) -> None:
        """Write the vocabulary for the ranks now, if the model has a tokenizer."""
        tokens = self._make_tokens()
        if tokens.data:
            tokens.write(self._path)

    def lark(self, format_: AnswerFormat) -> str:
        """Return the format as Lark. Raises RequestError if it cannot be converted; the reason depends only on counts, so that
        every machine gives the same answer, also after a crash. A helper's time limit is only for hangs."""
        num_bytes = len(format_.text.encode(errors="surrogatepass"))
        if num_bytes > self._max_bytes:
            raise _refused(
                format_.param,
                f"it has {num_bytes} bytes, the limit is {self._max_bytes}; shorten it, or start with a larger "
                "--max-grammar-bytes",
            )
        from engine.grammars.formats import lark_of

        self._ready()
        try:
            return lark_of(format_, self._marks)
        except ValueError as error:
            raise _refused(format_.param, str(error)) from None

    def grammar(self, lark: str, param: str) -> Grammar:
        """Return the grammar for Lark text from the request's field `param`, compiled once. Raises RequestError if it is not
        valid."""
        from engine.grammars.formats import HEAD, cause_of

        lark = HEAD + lark
        from engine.grammars.work import check_work

        if "\0" in lark or not _is_unicode(lark):
            raise _refused(param, "it has a NUL or an unpaired surrogate")
        try:
            check_work(lark)
        except ValueError as error:
            raise _refused(param, str(error)) from None
        refusal = self._ready().error_of(lark)
        if refusal:
            raise _refused(param, cause_of(refusal))
        return Grammar(lark, self._end_of_thinking)

    def of_calls(self, lark: str, format_lark: str = "") -> Grammar:
        """Return the grammar of calls, or of calls or an answer of `format_lark`, which is part of `lark`."""
        num_characters = len(lark) - len(format_lark)
        if num_characters > self._max_bytes:
            raise _refused(
                "tools",
                f"their grammar has {num_characters} characters, the limit is {self._max_bytes}; send fewer tools, or start "
                "with a larger --max-grammar-bytes",
            )
        return self.grammar(lark, "tools")

    def check_tokens(self, grammar: Grammar, sampling: SamplingParams) -> None:
        """Raise RequestError if other parameters leave no token with which an answer of this format can start: the format alone
        would decide. Later in an answer the format decides if needed, because this cannot be known in advance."""
        allowed, banned = sampling.allowed_token_ids, {word[0] for word in sampling.bad_words_token_ids if len(word) == 1}
        if not allowed and not banned:
            return
        mask = self._ready().first_mask(grammar.text)
        if allowed and not any(_has(mask, token_id) for token_id in allowed):
            raise _refused("allowed_token_ids", "structured output cannot start with any of them; allow others")
        left = (token_id for token_id in allowed or range(8 * len(mask)) if _has(mask, token_id))
        if all(token_id in banned for token_id in left):
            raise _refused("bad_words", "structured output can only start with one of them; ban others")

    def with_budget(self, grammar: Grammar | None, max_thinking_tokens: int) -> Grammar:
        """Return `grammar`, or one without a format, that limits the tokens of reasoning."""
        self._ready()
        return Grammar(grammar.text if grammar else "", self._end_of_thinking, self._begin_of_thinking, max_thinking_tokens)

    def _ready(self) -> Matching:
        if self._matching is None:
            from engine.grammars.matching import Matching

            tokens: GrammarTokens = self._make_tokens()
            if not tokens.data:
                raise RequestError("structured output needs a tokenizer, and this model has none")
            tokens.write(self._path)
            self._matching, self._marks = Matching(tokens), tokens.marks()
        return self._matching


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def _refused(param: str, cause: str) -> RequestError:
    return RequestError(f"{param} cannot be used: {cause}", code="invalid_value", param=param)

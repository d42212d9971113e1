"""Formats of answers become grammars, which llguidance has compiled once, within its limits, before they travel.

Used in the tokenizer's helper processes alone: what takes too long, or too much memory, ends with the helper, and another
request's text is in another lane. Nothing is imported or made before a request has a format.
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
    """`make_tokens` gives the vocabulary that is written to `path`, for the ranks. `end_of_thinking` and
    `begin_of_thinking`: token ids (int32); empty: the model does not think."""

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
        self._marks: dict[str, int] = {}  # of the vocabulary: to look for them among all tokens takes as long as to compile

    def lark(self, format_: AnswerFormat) -> str:
        """The format as Lark. RequestError says why there is none. That is a matter of counts alone, so that each machine says
        the same, also after a crash; a helper's bound of time is for what hangs."""
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
        """The grammar of Lark that `param` of a request asks for, compiled once. RequestError says why it cannot be one."""
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
        """The grammar of calls, or of calls or an answer of `format_lark`, which is part of `lark`."""
        num_characters = len(lark) - len(format_lark)
        if num_characters > self._max_bytes:
            raise _refused(
                "tools",
                f"their grammar has {num_characters} characters, the limit is {self._max_bytes}; send fewer tools, or start "
                "with a larger --max-grammar-bytes",
            )
        return self.grammar(lark, "tools")

    def check_tokens(self, grammar: Grammar, sampling: SamplingParams) -> None:
        """RequestError where what is asked for besides leaves nothing to begin an answer of this format with: the format alone
        would decide. Later on it does where need be, as how an answer goes on nobody knows before."""
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
        """`grammar`, or none, after at most so many tokens of thinking."""
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

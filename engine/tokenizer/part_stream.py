"""Turns token ids into the parts of an answer, as `detokenizer.py` does for an answer that is only content.

Used by `text_stream.py` if a request's answer is parsed. What is released after n tokens depends only on these n tokens and the
request, so that a replay continues byte for byte. Stop strings are searched in the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from engine.messages import Part, TextOptions
from engine.parsers.answer_parser import EDGE, AnswerParser
from engine.tokenizer.detokenizer import Detokenizer
from engine.tokenizer.vocabulary import Vocabulary

CONTENT = "content"


class PartStream(Detokenizer):
    """A `Detokenizer` with the content as its text; `take_parts` has the rest."""

    __slots__ = (
        "_begin",
        "_end_sent",
        "_has_begun",
        "_marker_of_id",
        "_parser",
        "_parts",
        "_skipped_ids",
        "_space",
        "num_reasoning_tokens",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: TextOptions,
        parser: AnswerParser,
        marker_of_id: Mapping[int, str],
        *,
        min_tokens: int = 0,
        is_continuation: bool = True,
    ) -> None:
        super().__init__(vocabulary, options, min_tokens=min_tokens, is_continuation=is_continuation)
        self._parser = parser
        self._marker_of_id = marker_of_id
        self._skipped_ids = vocabulary.special_ids if options.skip_special_tokens else frozenset[int]()
        self._parts: list[Part] = []
        self._space: list[str] = []  # at the end of the content: newlines, or any space at the start of the answer
        self._has_begun = False  # something other than space was released
        self._begin = 0  # the first token that belongs to no part yet
        self._end_sent = 0  # end of the tokens of the parts that were taken
        self.num_reasoning_tokens = 0

    @property
    def num_malformed_calls(self) -> int:
        return self._parser.num_malformed

    @property
    def is_over(self) -> bool:
        return self._parser.is_over or super().is_over

    def push(self, token_ids: Iterable[int]) -> str:
        released = ""
        for token_id in token_ids:
            if self.is_over:
                break
            self.num_tokens += 1
            was_reasoning = self._parser.is_reasoning
            marker = self._marker_of_id.get(token_id)
            if marker is None:
                text = self._decoder.push(token_id)
                if text:
                    self._parser.feed(text)
            else:
                self._parser.feed(self._decoder.finish())
                self._parser.feed_marker(marker, is_hidden=token_id in self._skipped_ids)
            self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
            if self._parser.parts:
                released += self._taken()
        return released

    def finish(self) -> str:
        self._parser.feed(self._decoder.finish())
        self._parser.finish()
        released = self._taken()
        if self.stop_string is None:
            released += self._content(self._stops.release() if self._stops else "") + self._release()
        return released

    def take_parts(self) -> list[Part]:
        """Return the parts released since the last call; none if they are only content."""
        parts, self._parts = self._parts, []
        if not parts:
            return []
        first, begin = parts[0], self._end_sent
        self._end_sent = parts[-1].end
        is_all = len(parts) == 1 and first.kind == CONTENT and (first.begin, first.end) == (begin, self.num_tokens)
        return [] if is_all else parts

    def _taken(self) -> str:
        """Take the parts that the parser released; content only up to a stop string."""
        released = ""
        for part in self._parser.take():
            if part.kind == CONTENT:
                text = part.text
                if self._stops:
                    text = self._stops.feed(text, may_stop=self.num_tokens >= self._min_tokens)
                released += self._content(text)
                if self.stop_string is not None:
                    return released + self._release()
                continue
            if self._stops:  # none continues after another part
                released += self._content(self._stops.release())
            if part.kind == EDGE.kind:
                self._space.clear()
                self._begin = max(self._begin, self.num_tokens - 1)
            else:
                self._append(part)
        is_held = self._parser.is_holding or self._space or (self._stops and self._stops.is_holding)
        if not is_held:
            self._begin = self.num_tokens
        return released

    def _content(self, text: str) -> str:
        """Return the text, with the space before it, that is certainly content."""
        body = text.rstrip("\n") if self._has_begun or not text.isspace() else ""
        released = "".join((*self._space, body)) if body else ""
        if body:
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])
        if released:
            self._append(Part(CONTENT, released))
        return released

    def _release(self) -> str:
        """Release the space at the end of the content: no marker follows."""
        text = "".join(self._space)
        self._space.clear()
        if text:
            self._append(Part(CONTENT, text))
        return text

    def _append(self, part: Part) -> None:
        """Append a part, joined with the previous one if it has the same kind (calls excepted)."""
        self._has_begun = True
        part = msgspec.structs.replace(part, begin=self._begin, end=self.num_tokens)
        self._begin = self.num_tokens
        if part.kind in (CONTENT, "reasoning") and self._parts and self._parts[-1].kind == part.kind:
            before = self._parts.pop()
            part = msgspec.structs.replace(part, text=before.text + part.text, begin=before.begin)
        self._parts.append(part)

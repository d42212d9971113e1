"""Token ids to the parts of an answer: what `detokenizer.py` is for an answer that is content alone.

Used by `text_stream.py` where a request's answer is parsed. What is released after n tokens is a function of these n tokens and
the request, so that a replay goes on byte for byte. Stop strings are looked for in the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from engine.messages import Part, TextOptions
from engine.parsers.answer_parser import AnswerParser
from engine.tokenizer.detokenizer import Detokenizer
from engine.tokenizer.vocabulary import Vocabulary

CONTENT = "content"


class PartStream(Detokenizer):
    """A `Detokenizer` whose text is the content; `take_parts` has the rest."""

    __slots__ = ("_marker_of_id", "_parser", "_parts", "_skipped_ids", "num_reasoning_tokens")

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
        held = self._stops.release() if self._stops else ""
        return released + self._content(held)

    def take_parts(self) -> list[Part]:
        """What was released since the last call, where that is not content alone."""
        parts, self._parts = self._parts, []
        return parts if any(part.kind != CONTENT for part in parts) else []

    def _taken(self) -> str:
        """What the parser has released; its content, as far as it is no stop string."""
        released = ""
        for part in self._parser.take():
            if part.kind != CONTENT:
                if self._stops:  # none goes on behind another part
                    released += self._content(self._stops.release())
                self._append(part)
                continue
            text = part.text
            if self._stops:
                text = self._stops.feed(text, may_stop=self.num_tokens >= self._min_tokens)
            released += self._content(text)
            if self.stop_string is not None:
                break
        return released

    def _content(self, text: str) -> str:
        if text:
            self._append(Part(CONTENT, text))
        return text

    def _append(self, part: Part) -> None:
        """Neighbours of a kind become one, but for calls."""
        if part.kind in (CONTENT, "reasoning") and self._parts and self._parts[-1].kind == part.kind:
            part = msgspec.structs.replace(part, text=self._parts.pop().text + part.text)
        self._parts.append(part)

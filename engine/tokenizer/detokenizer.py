"""Token ids back to text, a few at a time.

Used by the tokenizer processes, one `Detokenizer` per open sequence. The text released after n tokens depends only on these n
tokens and the options, not on how the tokens were split into pushes. So a restarted tokenizer that replays the tokens a client
already has, and drops that text, continues byte for byte where the dead one stopped.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.messages import TextOptions
from engine.tokenizer.stop_strings import StopStrings
from engine.tokenizer.vocabulary import Vocabulary


class TextDecoder:
    """Decodes token bytes to whole characters. An invalid byte sequence becomes U+FFFD, a possible beginning waits."""

    __slots__ = ("_is_first", "_pending", "_skipped_ids", "_token_bytes", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, is_continuation: bool) -> None:
        """`is_continuation`: there is text before (a prompt), so the first token keeps the space before its word."""
        self._vocabulary = vocabulary
        self._token_bytes = vocabulary.token_bytes
        self._skipped_ids = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._is_first = not is_continuation
        self._pending = b""  # an incomplete character, at most 3 bytes

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""
        if token_id in self._skipped_ids or not 0 <= token_id < len(self._token_bytes):
            return ""
        if self._is_first:
            self._is_first = False
            data = self._vocabulary.first_bytes_of(token_id)
        else:
            data = self._pending + self._token_bytes[token_id]
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def finish(self) -> str:
        """Return U+FFFD if the tokens ended within a character."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class Detokenizer:
    """One sequence's text: whole characters, with stop strings found and possible beginnings of them held back."""

    __slots__ = ("_decoder", "_min_tokens", "_stops", "num_tokens")

    def __init__(
        self, vocabulary: Vocabulary, options: TextOptions, *, min_tokens: int = 0, is_continuation: bool = True
    ) -> None:
        """`min_tokens`: a stop string that is complete before this many tokens does not count."""
        self.num_tokens = 0  # taken so far; none after a stop string
        self._decoder = TextDecoder(
            vocabulary, skip_special_tokens=options.skip_special_tokens, is_continuation=is_continuation
        )
        self._stops = StopStrings(options.stop, is_included=options.include_stop_str_in_output) if options.stop else None
        self._min_tokens = min_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; the last token completed it."""
        return self._stops.found if self._stops else None

    @property
    def is_over(self) -> bool:
        """Whether further tokens are ignored."""
        return self._stops is not None and self._stops.found is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens up to the one that completes a stop string; return the text that they release."""
        released = ""
        for token_id in token_ids:
            if self._stops and self._stops.found is not None:
                break
            self.num_tokens += 1
            text = self._decoder.push(token_id)
            if text and self._stops:
                text = self._stops.feed(text, may_stop=self.num_tokens >= self._min_tokens)
            released += text
        return released

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens follow."""
        held = self._stops.release() if self._stops else ""
        return held + self._decoder.finish()


def decode(vocabulary: Vocabulary, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of `token_ids`."""
    decoder = TextDecoder(vocabulary, skip_special_tokens=skip_special_tokens, is_continuation=False)
    return "".join(map(decoder.push, token_ids)) + decoder.finish()

"""A matcher that allows no duplicate key in a JSON object, which a grammar cannot express.

Used by `matching.py` for grammars with the note `UNIQUE_KEYS`: answers in JSON with objects that may have keys which the schema
does not name. If only known keys can follow, the mask stays unchanged.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from ctypes import c_uint8
from itertools import accumulate

import msgspec

from engine.grammars.matcher import Matcher
from engine.grammars.tokens import GrammarTokens

_SPACE = b" \t\r\n"
_QUOTE = re.compile(rb'"')


class KeyState(msgspec.Struct, frozen=True):
    """Position of a text in JSON."""

    objects: tuple[frozenset[str] | None, ...] = ()  # keys of each open object, None for a list, outermost first
    mode: str = "value"  # "value" | "key": one may begin | "in key" | "in text"
    written: bytes = b""  # of the open key or text
    is_escape: bool = False

    def after(self, data: bytes) -> KeyState | None:
        """Return the state after `data`; None: a key occurs twice."""
        return self._after(data, may_repeat=False)

    def after_any(self, data: bytes) -> KeyState:
        """Return the state after `data`, which may have a duplicate key."""
        state = self._after(data, may_repeat=True)
        assert state is not None
        return state

    def _after(self, data: bytes, may_repeat: bool) -> KeyState | None:
        objects, mode, written, is_escape = list(self.objects), self.mode, bytearray(self.written), self.is_escape
        for byte in data:
            if mode in ("in key", "in text"):
                if is_escape or byte == 0x5C:
                    is_escape = not is_escape
                elif byte == 0x22:
                    if mode == "in key":
                        keys, key = objects[-1], _decoded(bytes(written))
                        if keys is not None:
                            if key in keys and not may_repeat:
                                return None
                            objects[-1] = keys | {key}
                    mode = "value"
                    written.clear()
                    continue
                if mode == "in key":
                    written.append(byte)
            elif byte == 0x22:
                mode = "in key" if mode == "key" else "in text"
            elif byte in b"{[":
                objects.append(frozenset() if byte == 0x7B else None)
                mode = "key" if byte == 0x7B else "value"
            elif byte in b"}]" and objects:
                objects.pop()
                mode = "value"
            elif byte == 0x2C and objects:
                mode = "key" if objects[-1] is not None else "value"
        return KeyState(tuple(objects), mode, bytes(written), is_escape)


def _decoded(raw: bytes) -> str:
    try:
        return str(json.loads(b'"' + raw + b'"'))
    except ValueError:
        return raw.decode(errors="replace")


class QuotingTokens:
    """The tokens that contain a quote, by the text before it."""

    def __init__(self, tokens: GrammarTokens) -> None:
        ends = array("Q", accumulate(array("I", tokens.sizes)))
        self._data, self._ends = tokens.data, ends
        self.closing: dict[bytes, list[int]] = {}  # text before a token's first quote -> the tokens
        self.several: list[int] = []  # with two or more quotes: may begin and end a key
        last = -1
        for match in _QUOTE.finditer(tokens.data):
            token_id = bisect_right(ends, match.start())
            if token_id != last:
                begin = ends[token_id - 1] if token_id else 0
                self.closing.setdefault(tokens.data[begin : match.start()], []).append(token_id)
            elif not self.several or self.several[-1] != token_id:
                self.several.append(token_id)
            last = token_id

    def bytes_of(self, token_id: int) -> bytes:
        return self._data[self._ends[token_id - 1] if token_id else 0 : self._ends[token_id]]


class UniqueKeyMatcher(Matcher):
    """A `Matcher` for an answer in JSON, or with other text instead (calls)."""

    __slots__ = ("_states", "_tokens")

    def __init__(self, matcher: Matcher, tokens: QuotingTokens, states: Iterable[KeyState] = (KeyState(),)) -> None:
        super().__init__(matcher._vocabulary, matcher._take_address())
        self._tokens = tokens
        self._states = list(states)  # before the first token, and after each

    def copy(self) -> UniqueKeyMatcher:
        return UniqueKeyMatcher(super().copy(), self._tokens, self._states)

    def consume(self, *token_ids: int) -> bool:
        if not super().consume(*token_ids):
            return False
        for token_id in token_ids:
            self._states.append(self._states[-1].after_any(self._tokens.bytes_of(token_id)))
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        num_valid, state = super().num_valid(token_ids), self._states[-1]
        for index in range(num_valid):
            following = state.after(self._tokens.bytes_of(token_ids[index]))
            if following is None:
                return index
            state = following
        return num_valid

    def rollback(self, num_tokens: int) -> bool:
        if not super().rollback(num_tokens):
            return False
        del self._states[len(self._states) - num_tokens :]
        return True

    def fill_mask(self, address: int, num_bytes: int) -> None:
        super().fill_mask(address, num_bytes)
        mask = (c_uint8 * num_bytes).from_address(address)
        taken = [token_id for token_id in self._repeating() if mask[token_id >> 3] >> (token_id & 7) & 1]
        if not taken:
            return
        before = bytes(mask)
        for token_id in taken:
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        if not any(mask):
            mask[:] = list(before)

    def _repeating(self) -> Iterable[int]:
        """Yield tokens that would end a key that the object already has."""
        state = self._states[-1]
        keys = state.objects[-1] if state.objects else None
        if keys and state.mode == "in key" and not state.is_escape:
            for key in keys:
                for ensure_ascii in {False, not key.isascii()}:  # as JSON is usually written
                    raw = json.dumps(key, ensure_ascii=ensure_ascii)[1:-1].encode(errors="surrogatepass")
                    if raw.startswith(state.written):
                        yield from self._tokens.closing.get(raw[len(state.written) :], ())
            if _decoded(state.written) in keys:  # however it is escaped
                yield from self._tokens.closing.get(b"", ())
        if any(state.objects):
            for token_id in self._tokens.several:
                if state.after(self._tokens.bytes_of(token_id)) is None:
                    yield token_id

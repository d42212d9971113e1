"""Splits an answer into parts: content, reasoning, calls and their arguments.

Used by `engine/tokenizer/part_stream.py`, one for each open sequence. What has been released after n tokens depends only on
these tokens and the request. A marker is recognized by its own token; one that the vocabulary lacks is searched in the text,
which is held back only while it may become one. A call is held until it is complete; if it turns out to be none, its text
becomes content unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.messages import Part
from engine.parsers.family import CallFamily, Tools
from engine.parsers.reader import Malformed, Reader, Reading, num_beginning
from engine.parsers.thinking import ThinkingFamily

_LOG = logging.getLogger(__name__)
EDGE = Part("edge", "")  # among the parts: newlines of the content just before it are dropped


class AnswerParser:
    def __init__(
        self,
        *,
        call_family: CallFamily | None,
        thinking: ThinkingFamily | None,
        tools: Callable[[], Tools],
        names: frozenset[str] = frozenset(),
        token_markers: frozenset[str] = frozenset(),
        begins_thinking: bool = False,
        request_id: str = "",
        is_parallel: bool = True,
        has_thinking_budget: bool = False,
        must_begin: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        """`tools` are read at the first call. `names`: functions that may be called, none: any. `token_markers`: markers with
        their own token. `is_parallel`: more than one call is allowed. `has_thinking_budget`: the end of the reasoning may have
        been forced. `must_begin`: calls come before any content, or not at all. `shows_reasoning`: sections of reasoning are no
        content."""
        self.parts: list[Part] = []  # released and not taken yet
        self.is_reasoning = begins_thinking
        self.is_over = False  # the rest is ignored
        self.num_malformed = 0  # texts that began like a call but were none
        self._family = call_family
        self._thinking = thinking
        self._tools = tools
        self._names = names
        self._request_id = request_id
        self._is_parallel = is_parallel
        self._num_calls = 0
        self._triggers = call_family.triggers if call_family else ()
        sought = {*self._triggers}
        if thinking:
            sought |= {thinking.begin, thinking.end, *thinking.wrappers}
        self._sought = tuple(sought - token_markers)  # searched in the text
        self._held = ""  # may become a marker
        self._num_newlines = 0  # newlines in the reasoning that may belong to the next marker
        self._is_stripping = begins_thinking  # the next newlines belong to the previous part
        self._has_begun = begins_thinking  # something other than space was written
        self._has_content = False  # the same, outside of reasoning
        self._may_open = bool(call_family and call_family.openings)  # a call without a marker may come
        self._reader: Reader | None = None
        self._reading: Reading[None] | None = None
        self._last_marker = ""  # read as text, with nothing after it
        self._is_end_due = False  # the end of reasoning is due, after a call ended it
        self._has_thinking_budget = has_thinking_budget
        self._must_begin = must_begin
        self._shows_reasoning = shows_reasoning
        self._label = thinking.label if thinking and begins_thinking else ""  # due at the beginning of the reasoning
        self._labelled = ""  # may become the label
        self._may_drop_end = not begins_thinking or has_thinking_budget  # an end marker outside of reasoning that is not text

    @property
    def is_holding(self) -> bool:
        """Whether something was taken that cannot be classified yet."""
        return self._reader is not None or bool(self._held) or self._num_newlines > 0

    # --------------------------------------------------------------------------------------------------------- input

    def feed(self, text: str) -> None:
        """Take the text of a token that is not a marker."""
        while text and not self.is_over:
            text = self._plain(self._held + text) if self._reader is None else self._read(self._reader, text)

    def feed_marker(self, marker: str, is_hidden: bool) -> None:
        """Take a marker's own token. `is_hidden`: it is not shown if it turns out to be text."""
        reader = self._reader
        if reader is not None:
            is_call, unread = self._advance(reader, marker)
            if not is_call:
                self._end_reading(reader.raw_before)
                is_hidden = False
            elif unread != marker:
                if self._reader is reader:  # a complete call used the marker
                    self._last_marker = marker
                self.feed(unread)
                return
        if self.is_over:
            return
        self._release()
        self._meet(marker, is_hidden)

    def finish(self) -> None:
        """End the answer: no more text follows."""
        while (reader := self._reader) is not None:
            reader.end()
            is_call, unread = self._advance(reader, "")
            self.feed(unread if is_call else self._give_up(reader))
        self._release()
        self._num_newlines = 0

    def take(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts

    # ---------------------------------------------------------------------------------------------------------- text

    def _plain(self, text: str) -> str:
        """Take text outside of calls, up to the first marker; return the rest."""
        self._held = ""
        if self._may_open and self._family and not self.is_reasoning:
            place = len(text) - len(text.lstrip())
            if text[place : place + 1] and text[place] in self._family.openings:
                self._begin_call("", text[:place])
                return text[place:]
        places = [(place, marker) for marker in self._sought if (place := text.find(marker)) >= 0]
        if places:
            place, marker = min(places)
            self._release_text(text[:place])
            self._meet(marker, is_hidden=False)
            return text[place + len(marker) :]
        end = len(text) - num_beginning(text, *self._sought)
        self._release_text(text[:end])
        self._held = text[end:]
        return ""

    def _meet(self, marker: str, is_hidden: bool) -> None:
        thinking = self._thinking
        if thinking and marker == thinking.begin and not self._has_begun:
            self._end_section()
            self.is_reasoning = self._has_begun = True
            self._label = thinking.label
            self._may_drop_end = self._has_thinking_budget
        elif thinking and marker == thinking.end and (self.is_reasoning or self._is_end_due):
            self._is_end_due = False
            self._end_section()
        elif (
            thinking and marker == thinking.end and self._may_drop_end
        ):  # the model's own end, after the forced one or without reasoning
            self._may_drop_end = False
        elif thinking and marker in thinking.wrappers:
            self._end_section()
        elif marker in self._triggers and not (self._must_begin and self._has_content):
            self._begin_call(marker, marker)
        elif not is_hidden:
            self._may_drop_end = self._may_drop_end and not (thinking and marker == thinking.begin)
            self._release_text(marker)

    def _end_section(self) -> None:
        """End a section; newlines around the end are dropped."""
        self.is_reasoning = False
        self._is_stripping = True
        self._label = self._labelled = ""
        self._num_newlines = 0
        self.parts.append(EDGE)

    def _release(self) -> None:
        """Release held text that can no longer become a marker."""
        held, self._held = self._held, ""
        self._release_text(held)

    def _release_text(self, text: str) -> None:
        if not text:
            return
        if self._label:
            text, self._labelled = self._labelled + text, ""
            if self._label.startswith(text):
                self._labelled = text
                return
            text, self._label = text.removeprefix(self._label), ""
        if self._is_stripping:
            text = text.lstrip("\n")
            if not text:
                self.parts.append(EDGE)
                return
        self._is_stripping = False
        self._has_begun = self._has_begun or not text.isspace()
        if not self.is_reasoning:
            self._has_content = self._has_content or not text.isspace()
            self._may_open = self._may_open and text.isspace()
            self.parts.append(Part("content", text))
            return
        body = text.rstrip("\n")
        if body:
            self.parts.append(Part("reasoning", "\n" * self._num_newlines + body))
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)

    # --------------------------------------------------------------------------------------------------------- calls

    def _begin_call(self, trigger: str, opening: str) -> None:
        assert self._family is not None
        self._last_marker = ""
        self._reader = Reader(opening, self._names)
        self._reading = self._reading_of(self._family, self._reader, trigger)
        self._advance(self._reader, "")  # up to where it needs the first character

    def _reading_of(self, family: CallFamily, reader: Reader, trigger: str) -> Reading[None]:
        """Read as the family does. Another error of it (a plugin may raise anything) leaves the text content, like damage."""
        try:
            yield from family.read(reader, trigger, self._tools())
            return
        except Malformed:
            raise
        except Exception:
            _LOG.exception("the parser %s failed; the text of the call becomes content", family.name)
        if len(reader.raw) == reader.num_opening and not reader.unread:
            yield  # a call is given up when it has a character, or ends
        raise Malformed

    def _read(self, reader: Reader, text: str) -> str:
        """Read the next piece of a call; return what it leaves unread."""
        is_call, unread = self._advance(reader, text)
        return unread if is_call else self._give_up(reader)

    def _advance(self, reader: Reader, text: str) -> tuple[bool, str]:
        """Read a piece. Return whether it may be a call or completed one, and what is left unread."""
        assert self._reading is not None
        reader.feed(text)
        unread = ""
        try:
            next(self._reading)
        except StopIteration:
            unread, self._reader, self._reading = reader.unread, None, None
        except Malformed:
            self._take_calls(reader)
            return False, reader.unread
        self._take_calls(reader)
        self._last_marker = ""
        if self._reader is None and reader.section:
            self._end_section()
            self._has_begun = True
            self._may_open = False
            self.is_reasoning = reader.section == "reasoning" and self._shows_reasoning
        return True, unread

    def _take_calls(self, reader: Reader) -> None:
        for call in reader.calls:
            if self.is_over:
                break
            assert self._family is not None
            self._is_end_due = self._is_end_due or self.is_reasoning
            self._end_section()
            self._has_begun = True
            self._may_open = False
            call_id = call.id or self._family.call_id(self._request_id, self._num_calls)
            self.parts.append(Part("call", call.name, self._num_calls, call_id))
            self.parts.append(Part("arguments", call.arguments, self._num_calls))
            self._num_calls += 1
            self.is_over = not self._is_parallel
        reader.calls.clear()

    def _give_up(self, reader: Reader) -> str:
        """Give up a call: its text becomes content, except a marker (or the beginning of one) at its end. Return the text to
        read again."""
        raw, unread, marker = reader.raw, reader.unread, self._last_marker
        if marker and raw == reader.raw_before:
            self._end_reading(raw[: len(raw) - len(marker)])
            self._meet(marker, is_hidden=False)
            return unread
        own = raw[reader.num_opening :]
        num_again = max((len(each) for each in self._sought if own.endswith(each)), default=num_beginning(own, *self._sought))
        self._end_reading(raw[: len(raw) - num_again])
        return raw[len(raw) - num_again :] + unread

    def _end_reading(self, raw: str) -> None:
        """End the reading of a text that is no call."""
        self._reader = self._reading = None
        self._last_marker = ""
        self._has_begun = True
        self._may_open = False
        self.num_malformed += 1
        if raw.strip() or not self._is_stripping:
            self._release_text(raw)

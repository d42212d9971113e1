"""Turns an answer's parts into content blocks and events; a stream has the same blocks as the whole message.

Used by `messages.py` in the api process.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

import msgspec

from api.anthropic.answers import (
    BlockDelta,
    BlockDeltaEvent,
    BlockStart,
    BlockStop,
    Content,
    InputJsonDelta,
    MessageEvent,
    SignatureDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from engine.messages import Part

_NO_INPUT = msgspec.Raw(b"{}")


class Blocks:
    """Content blocks of one message. A block is open until another begins, or the message ends."""

    def __init__(self, shows_thinking: bool) -> None:
        """`shows_thinking`: otherwise thinking blocks are empty, with their signatures."""
        self.blocks: list[Content] = []  # closed blocks
        self._shows_thinking = shows_thinking
        self._open: Part | None = None  # the first part of the open block
        self._texts: list[str] = []

    def take(self, parts: Iterable[Part]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for part in parts:
            if not self._belongs(part):
                events += self.close()
                self._open = part
                events.append(BlockStart(len(self.blocks), self._content(part)))
            if part.kind != "call":
                self._texts.append(part.text)
                if delta := self._delta(part):
                    events.append(BlockDeltaEvent(len(self.blocks), delta))
        return events

    def close(self) -> list[MessageEvent]:
        """Close the open block."""
        if self._open is None:
            return []
        index, block, text = len(self.blocks), self._content(self._open), "".join(self._texts)
        events: list[MessageEvent] = []
        if isinstance(block, TextContent):
            block.text = text
        elif isinstance(block, ThinkingContent):
            block.thinking, block.signature = text if self._shows_thinking else "", signature_of(text)
            events.append(BlockDeltaEvent(index, SignatureDelta(block.signature)))
        elif text:
            block.input = msgspec.Raw(text.encode())
        self.blocks.append(block)
        self._open, self._texts = None, []
        return [*events, BlockStop(index)]

    def _belongs(self, part: Part) -> bool:
        """Return whether a part belongs to the open block."""
        if self._open is None or part.kind == "call":
            return False
        return part.kind == ("arguments" if self._open.kind == "call" else self._open.kind)

    def _content(self, part: Part) -> Content:
        """Return an empty block."""
        if part.kind == "call":
            return ToolUseContent(part.call_id, part.text, _NO_INPUT)
        return ThinkingContent("", "") if part.kind == "reasoning" else TextContent("")

    def _delta(self, part: Part) -> BlockDelta | None:
        if part.kind == "content":
            return TextDelta(part.text)
        if part.kind == "arguments":
            return InputJsonDelta(part.text)
        return ThinkingDelta(part.text) if self._shows_thinking else None


def signature_of(thinking: str) -> str:
    """Return the signature that clients send back with a thinking block. It is not checked."""
    return base64.b64encode(hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=24).digest()).decode()

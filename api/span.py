"""Parts of a request's span, and its parent. Used by `spans.py`; W3C's trace context: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from starlette.datastructures import Headers

OPERATIONS = {  # operations of the model, by path
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "rerank",
    "/rerank": "rerank",
    "/pooling": "embeddings",
    "/classify": "classify",
    "/v1/responses/compact": "chat",
}
MAX_STATE_CHARACTERS = 512  # of a `tracestate`; whole entries are left out to fit
MAX_STATE_ENTRIES = 32
LONG_ENTRY = 128  # characters; longer ones are left out first
SAMPLED = 1
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class SpanContext(msgspec.Struct, frozen=True):
    """Ids of a request's span: its parent's, and those named in the answer."""

    operation: str
    trace_id: int
    span_id: int
    parent_id: int = 0  # 0: it is the first span of its trace
    flags: int = SAMPLED
    state: str = ""  # `tracestate`, as received or shortened
    begin_ns: int = 0  # since 1970

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


class NotedSpan(msgspec.Struct, frozen=True):
    """All data of a span."""

    context: SpanContext
    name: str
    end_ns: int
    first_token_ns: int  # since 1970; 0: there was none
    attributes: dict[str, Any]
    error: str  # empty: no server error


def context_of(path: str, headers: Headers) -> SpanContext | None:
    """Return the context of a request; None: it gets no span. An invalid `traceparent` begins a new trace, as in the
    specification."""
    operation = OPERATIONS.get(path)
    if operation is None:
        return None
    span_id, begin_ns = secrets.randbits(64) or 1, time.time_ns()
    match = _PARENT.fullmatch(headers.get("traceparent", "").strip())
    if match is None or not int(match[2], 16) or not int(match[3], 16) or (match[1] == "00" and match[5]):
        return SpanContext(operation, secrets.randbits(128) or 1, span_id, begin_ns=begin_ns)
    state = _passed_on(",".join(headers.getlist("tracestate")))
    flags = int(match[4], 16) & SAMPLED
    return SpanContext(operation, int(match[2], 16), span_id, int(match[3], 16), flags, state, begin_ns)


def _passed_on(state: str) -> str:
    """Return a `tracestate`, shortened by whole entries if it is too long: long ones are left out first, then the last ones
    (https://www.w3.org/TR/trace-context/#tracestate-limits)."""
    entries = [entry for part in state.split(",") if (entry := part.strip())]
    num_characters = sum(map(len, entries)) + len(entries) - 1
    if len(state) <= MAX_STATE_CHARACTERS and len(entries) <= MAX_STATE_ENTRIES:
        return state
    for index in reversed(range(len(entries))):
        if num_characters > MAX_STATE_CHARACTERS and len(entries[index]) > LONG_ENTRY:
            num_characters -= len(entries.pop(index)) + 1
    while num_characters > MAX_STATE_CHARACTERS or len(entries) > MAX_STATE_ENTRIES:
        num_characters -= len(entries.pop()) + 1
    return ",".join(entries)

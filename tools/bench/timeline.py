"""Arrival times of the tokens of one streamed reply, read from its server-sent events.

Runs in the `tokamak bench serve` process, once per packet of every stream, hence the simple byte splitting and a decoder for
only the needed fields.

    t_sent          t_first     t_1     t_2  ...  t_last      [DONE]
      |--- TTFT ------|- ITL --|- ITL --|    ...    |            |
      |               |------ TPOT x (tokens - 1) --|            |
      |--------------------------- E2E --------------------------|

A chunk counts as a delivery if it has text, or has none and does not end the reply (text held back for an incomplete
character). So does the end of a reply without an earlier delivery, if its few tokens gave no text. A delivery may bring several
tokens, so ITL is per delivery, and TPOT uses the token count of the usage chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ChatDelta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None

    def is_delivery(self) -> bool:
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        has_content = bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)
        return has_content or (self.finish_reason is None and self.delta.role is None)


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class Timeline:
    """Timeline of a request in the client; all times are `perf_counter` seconds. `error` is a kind, such as "http 429",
    `detail` the server's message."""

    sent: float = 0.0
    ended: float = 0.0
    deliveries: list[float] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    is_complete: bool = False  # the stream said [DONE]
    error: str = ""
    detail: str = ""
    head: bytes = b""  # the body up to the first delivery, for error messages
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Process a piece of the body of a streamed reply."""
        now = perf_counter()
        if not self.deliveries:
            self.head += data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now)

    def _on_event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.is_complete = True
            self.ended = now
            return
        try:
            chunk = _decoder.decode(event)
        except msgspec.DecodeError as error:
            self.fail("bad event", f"{error}: {event[:200]!r}", now)
            return
        if chunk.error is not None:
            self.fail("error in stream", str(chunk.error), now)
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.choices and (chunk.choices[0].is_delivery() or (chunk.choices[0].finish_reason and not self.deliveries)):
            self.deliveries.append(now)

    def fail(self, kind: str, detail: str, now: float) -> None:
        """Record an error, if it is the first."""
        if not self.error:
            self.error, self.detail, self.ended = kind, detail, now

    @property
    def num_output_tokens(self) -> int:
        return self.usage.completion_tokens or len(self.deliveries)

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    @property
    def ttft_s(self) -> float:
        return self.deliveries[0] - self.sent

    @property
    def e2e_s(self) -> float:
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Return the seconds per output token after the first; None if there was only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.deliveries[-1] - self.deliveries[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.deliveries, self.deliveries[1:], strict=False)]

"""Events that the stream of a response sent before its process died. Pure.

Another process generates the response again from its beginning. The answer is the same, but its text may be split differently:
what was already sent is removed from the new events, piece by piece, and the stream continues after it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.responses.answers import ResponseEvent
from engine.errors import RequestError


class _Event(msgspec.Struct):
    type: str
    output_index: int = -1
    delta: str | None = None
    logprobs: list[msgspec.Raw] = []


Place = tuple[str, int]  # type of an event, output_index


class SentEvents:
    def __init__(self, events: bytes) -> None:
        """`events`: whole events of the stream."""
        self.number = 0
        self._once: set[Place] = set()  # events that are not pieces of a text
        texts: dict[Place, list[str]] = {}
        self._num_logprobs: dict[Place, int] = {}
        for event in events.split(b"\n\n")[:-1]:
            self.number += 1
            sent = msgspec.json.decode(event.partition(b"\ndata: ")[2], type=_Event)
            place = (sent.type, sent.output_index)
            if sent.delta is None:
                self._once.add(place)
            else:
                texts.setdefault(place, []).append(sent.delta)
                self._num_logprobs[place] = self._num_logprobs.get(place, 0) + len(sent.logprobs)
        self._texts = {place: "".join(pieces) for place, pieces in texts.items()}  # not reached by the new events yet

    def rest(self, events: list[ResponseEvent]) -> list[ResponseEvent]:
        """Return the new part of `events`. Raises RequestError (500) if the answer is different now."""
        return [event for event in events if self._is_new(event)]

    def _is_new(self, event: Any) -> bool:
        place = (str(event.__struct_config__.tag), getattr(event, "output_index", -1))
        delta: str | None = getattr(event, "delta", None)
        if delta is None:
            return place not in self._once
        sent = self._texts.get(place)
        if sent is None:
            return True
        num_sent = min(len(sent), len(delta))
        if sent[:num_sent] != delta[:num_sent]:
            text = "the HTTP process of this response stopped, and the weights have changed since; send the request again"
            raise RequestError(text, status=500, code="weights_changed")
        if len(sent) > num_sent:
            self._texts[place] = sent[num_sent:]
        else:
            del self._texts[place]
        event.delta = delta[num_sent:]
        logprobs: list[msgspec.Raw] = getattr(event, "logprobs", [])
        if logprobs:
            num_known = min(len(logprobs), self._num_logprobs[place])
            self._num_logprobs[place] -= num_known
            event.logprobs = logprobs[num_known:]
            return bool(event.delta or event.logprobs)
        return bool(event.delta)

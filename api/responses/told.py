"""Events that the stream of a response sent before its process died. Pure.

The response is made again from its beginning, by another process. Its answer is the same, though its text may come in other
pieces: what was told is left out of the new events, piece by piece, and the stream goes on behind it.
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


class ToldEvents:
    def __init__(self, events: bytes) -> None:
        """`events`: of the stream, whole ones."""
        self.number = 0
        self._once: set[Place] = set()  # events that are no pieces of a text
        texts: dict[Place, list[str]] = {}
        self._num_logprobs: dict[Place, int] = {}
        for event in events.split(b"\n\n")[:-1]:
            self.number += 1
            told = msgspec.json.decode(event.partition(b"\ndata: ")[2], type=_Event)
            place = (told.type, told.output_index)
            if told.delta is None:
                self._once.add(place)
            else:
                texts.setdefault(place, []).append(told.delta)
                self._num_logprobs[place] = self._num_logprobs.get(place, 0) + len(told.logprobs)
        self._texts = {place: "".join(pieces) for place, pieces in texts.items()}  # that the new events have not come to yet

    def rest(self, events: list[ResponseEvent]) -> list[ResponseEvent]:
        """Return the part of `events` that is new. RequestError (500): the answer is another one now."""
        return [event for event in events if self._is_new(event)]

    def _is_new(self, event: Any) -> bool:
        place = (str(event.__struct_config__.tag), getattr(event, "output_index", -1))
        delta: str | None = getattr(event, "delta", None)
        if delta is None:
            return place not in self._once
        told = self._texts.get(place)
        if told is None:
            return True
        num_told = min(len(told), len(delta))
        if told[:num_told] != delta[:num_told]:
            text = "the HTTP process of this response stopped, and the weights have changed since; send the request again"
            raise RequestError(text, status=500, code="weights_changed")
        if len(told) > num_told:
            self._texts[place] = told[num_told:]
        else:
            del self._texts[place]
        event.delta = delta[num_told:]
        logprobs: list[msgspec.Raw] = getattr(event, "logprobs", [])
        if logprobs:
            num_known = min(len(logprobs), self._num_logprobs[place])
            self._num_logprobs[place] -= num_known
            event.logprobs = logprobs[num_known:]
            return bool(event.delta or event.logprobs)
        return bool(event.delta)

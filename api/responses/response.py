"""One response, as a stream or whole. Runs in the api process."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec

from api.client.generation import Generation, OpenSequence
from api.openai.logprobs import LogprobsShown, chat_logprobs
from api.request_context import RequestContext
from api.responses.answers import (
    CachedTokens,
    IncompleteDetails,
    OpenAIResponse,
    ReasoningEcho,
    ReasoningTokens,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseUsage,
)
from api.responses.background import BackgroundResponses
from api.responses.conversation import ResponseTranslation, has_logprobs
from api.responses.items import Items
from api.responses.requests import ResponsesRequest
from api.responses.sent_events import SentEvents
from api.responses.store import MAX_RESPONSE_BYTES, ResponseStore, StoredResponse
from api.schemas.requests import dump
from api.schemas.responses import encoder
from api.sse import EventWriter
from engine.errors import RequestError
from engine.messages import Delta

_ENDS: dict[str, type[ResponseEvent]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "cancelled": ResponseIncomplete,  # there is no event of this name
    "failed": ResponseFailed,
}
END_NAMES = {status: str(event.__struct_config__.tag) for status, event in _ENDS.items()}  # of the last event
_CUT_OFF = {
    "timeout": "the request timed out before its answer was complete",
    "abort": "an operator aborted the request",
}


class ResponseWriter(EventWriter):
    def __init__(
        self,
        context: RequestContext,
        model_name: str,
        fields: dict[str, Any],
        body: ResponsesRequest,
        translation: ResponseTranslation,
        response_id: str = "",
        sent: SentEvents | None = None,
    ) -> None:
        """`fields`: of the body, with all items of the conversation as its `input`. `response_id`: of a response that is
        generated again, with its events so far in `sent`."""
        self._store = context.services.feature(ResponseStore)
        self._translation = translation
        self._items_sent = dump(fields["input"], "input")
        self._num_logprobs = (body.top_logprobs or 0) if has_logprobs(body) else None
        self._sent = sent
        self._num_events = sent.number if sent is not None else 0
        self._key = self._owner = ""
        if body.background:
            self._key, self._owner = context.key, context.services.feature(BackgroundResponses).owner
        reasoning = body.reasoning
        self.response = OpenAIResponse(
            id=response_id or self._store.new_id(context.source),  # the id grants access, so it contains nothing that is logged
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=model_name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=ReasoningEcho(reasoning.effort, reasoning.summary) if reasoning else ReasoningEcho(),
            store=body.store is not False,
            temperature=1.0,
            text=_raw(fields, "text", {"format": {"type": "text"}}),
            tool_choice=_raw(fields, "tool_choice", "auto"),
            tools=_raw(fields, "tools", []),
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0,
            truncation=body.truncation or "disabled",
            user=body.user,
        )
        seals_reasoning = "reasoning.encrypted_content" in (body.include or ())
        self._items = Items(self.response.id, translation.tools, seals_reasoning, translation.compacts)

    def take(self, generation: Generation) -> bytes:
        (sequence,) = generation.sequences
        if not sequence.pending:
            return b""
        events = [] if self._num_events else self._begun(sequence)
        events += self._leave_queue()
        delta = sequence.take()
        events += self._items.take(delta.all_parts, self._logprobs(sequence, delta))
        if sequence.is_finished:
            events += self._end(sequence)
        return self._encoded(events)

    def named(self, error: RequestError) -> RequestError:
        return self._translation.restore(error)

    def failed(self, error: RequestError) -> bytes:
        events = [] if self._num_events else self._begun(None)
        events += self._leave_queue()
        error = self.named(error)
        events += self._items.close("incomplete")
        events.append(self._fail(ResponseFailure("server_error" if error.status >= 500 else "invalid_prompt", error.message)))
        return self._encoded(events)

    def whole(self, generation: Generation) -> OpenAIResponse:
        (sequence,) = generation.sequences
        self._begun(sequence)
        delta = sequence.take()
        self._items.take(delta.all_parts, self._logprobs(sequence, delta))
        self._end(sequence)
        return self.response

    def _begun(self, sequence: OpenSequence | None) -> list[ResponseEvent]:
        if sequence is not None:
            sampling = sequence.generation.shared.sampling
            self.response.temperature, self.response.top_p = sampling.temperature, sampling.top_p
        begun = msgspec.structs.replace(self.response)
        second = ResponseQueued if begun.status == "queued" else ResponseInProgress
        return [ResponseCreated(response=begun), second(response=begun)]

    def queue(self, generation: Generation) -> bytes:
        """Return the first events of a background response, which is stored from now on."""
        (sequence,) = generation.sequences
        events = self._begun(sequence)
        self.response.store = self.keep()
        return self._encoded(events)

    def keep(self) -> bool:
        """Store the response in its current state; return whether it is stored."""
        made = encoder.encode(self.response.output)
        is_first = self._items_sent == b"[]"
        items = self._items_sent[:-1] + (b"" if is_first or made == b"[]" else b",") + made[1:]
        response = msgspec.Raw(encoder.encode(self.response))
        data = encoder.encode(StoredResponse(response, msgspec.Raw(items), self._key, self._owner))
        if len(data) > MAX_RESPONSE_BYTES and self.response.background and self.response.output:
            self.response.output = []
            text = f"the response has {len(data)} bytes, but the limit for background responses is {MAX_RESPONSE_BYTES}"
            self.response.status, self.response.error = "failed", ResponseFailure("server_error", text)
            return self.keep()
        return self._store.save(self.response.id, data)

    @property
    def num_bytes(self) -> int:
        """Stored size of the conversation and the response."""
        return len(self._items_sent) + len(encoder.encode(self.response))

    def _leave_queue(self) -> list[ResponseEvent]:
        if self.response.status != "queued":
            return []
        self.response.status = "in_progress"
        self.keep()
        return [ResponseInProgress(response=msgspec.structs.replace(self.response))]

    def _end(self, sequence: OpenSequence) -> list[ResponseEvent]:
        """Close what is open, and store the response before its client gets it."""
        response = self.response
        response.usage = usage_of(sequence)
        if sequence.finish_reason == "abort" and response.background:
            response.status = "cancelled"
            return [*self._items.close("incomplete"), self._ended()]
        if sequence.finish_reason in _CUT_OFF:
            events = self._items.close("incomplete")
            return [*events, self._fail(ResponseFailure("server_error", _CUT_OFF[sequence.finish_reason]))]
        is_cut = sequence.finish_reason == "length"
        events = self._items.close("incomplete" if is_cut else "completed")
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut else None
        return [*events, self._ended()]

    def _fail(self, failure: ResponseFailure) -> ResponseEvent:
        self.response.status, self.response.error = "failed", failure
        return self._ended()

    def _ended(self) -> ResponseEvent:
        response = self.response
        response.output, response.completed_at = self._items.items, int(time.time())
        if response.store and not response.background:  # `BackgroundResponses` stores these, with retries
            response.store = self.keep()
        return end_of(response)

    def _logprobs(self, sequence: OpenSequence, delta: Delta) -> list[msgspec.Raw]:
        """Return a `TokenLogprob` of each token as JSON, which is compact and copied into several events. The token that ended
        the answer has none, because it is not text."""
        if self._num_logprobs is None:
            return []
        is_end_hidden = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
        is_end_hidden = is_end_hidden and not sequence.generation.shared.text.include_stop_str_in_output
        entries = delta.logprobs[:-1] if is_end_hidden else delta.logprobs
        return [msgspec.Raw(encoder.encode(entry)) for entry in chat_logprobs(entries, LogprobsShown(self._num_logprobs))]

    def _encoded(self, events: list[ResponseEvent]) -> bytes:
        if self._sent is not None:
            events = self._sent.rest(events)
        begin = self._num_events
        self._num_events += len(events)
        return b"".join(encoded(event, number) for number, event in enumerate(events, begin))


def end_of(response: OpenAIResponse) -> ResponseEvent:
    """Return the last event of a response that has ended."""
    return _ENDS[response.status](response=response)  # type: ignore[call-arg]


def encoded(event: ResponseEvent, number: int) -> bytes:
    """Return an event of a stream. `number`: its position, from 0."""
    event.sequence_number = number
    tag = cast(str, event.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (tag, encoder.encode(event))


def usage_of(sequence: OpenSequence) -> ResponseUsage:
    num_made = len(sequence.delivered)
    return ResponseUsage(
        sequence.num_prompt_tokens,
        CachedTokens(sequence.num_cached_tokens),
        num_made,
        ReasoningTokens(sequence.num_reasoning_tokens),
        sequence.num_prompt_tokens + num_made,
    )


def _raw(fields: dict[str, Any], name: str, default: Any) -> msgspec.Raw:
    """Return a field as it was sent."""
    value = fields.get(name)
    return msgspec.Raw(dump(default if value is None else value, name))

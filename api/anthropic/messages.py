"""`POST /v1/messages` and `/v1/messages/count_tokens`. Runs in the api process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import cast

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from api.anthropic.answers import (
    AnthropicMessage,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    StopDelta,
    StopReason,
    TokensCount,
)
from api.anthropic.blocks import Blocks
from api.anthropic.conversation import translate
from api.anthropic.errors import error_of
from api.anthropic.requests import CountTokensRequest, MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from api.client.generation import Generation, OpenSequence
from api.errors import json_response
from api.request_context import RequestContext, until_finished
from api.schemas.responses import encoder
from api.sse import EventStream, EventWriter
from api.translation import Translation, count_translated, cut_off, open_translated
from engine.errors import RequestError


async def create_message(request: Request) -> Response:
    """Handle `POST /v1/messages`."""
    context = RequestContext.of(request)
    fields, body = await context.parse_with_fields(request, MessagesRequest)
    name = context.services.model.resolve(body.model)
    translation = translate(body, context.services.model)
    translation.add_ours(fields, MessagesRequest)
    generation = await open_translated(request, translation)
    headers = {"request-id": context.request_id}
    answer = MessageWriter(context, name, body, translation)
    if body.stream:
        return EventStream(generation, answer, headers)
    with translation.restored():
        await until_finished(generation, request.receive)
    return json_response(answer.whole(generation), headers=headers | generation.headers)


async def count_tokens(request: Request) -> Response:
    """Handle `POST /v1/messages/count_tokens`."""
    context = RequestContext.of(request)
    body = await context.parse(request, CountTokensRequest)
    num_tokens = await count_translated(request, translate(body, context.services.model))
    return json_response(TokensCount(num_tokens), headers={"request-id": context.request_id})


class MessageWriter(EventWriter):
    """Writes one message, as a stream or whole."""

    def __init__(self, context: RequestContext, model_name: str, body: MessagesRequest, translation: Translation) -> None:
        self._request_id = context.request_id
        self._id = f"msg_{hashlib.blake2b(context.key.encode(), digest_size=16).hexdigest()}"
        self._model_name = model_name
        self._translation = translation
        is_omitted = isinstance(body.thinking, (ThinkingEnabled, ThinkingAdaptive)) and body.thinking.display == "omitted"
        self._blocks = Blocks(shows_thinking=not is_omitted)
        self._has_begun = False

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def take(self, generation: Generation) -> bytes:
        (sequence,) = generation.sequences
        if not sequence.pending:
            return b""
        events: list[MessageEvent] = []
        if not self._has_begun:
            self._has_begun = True
            events += [MessageStart(self._message(sequence, is_begun=False)), Ping()]
        events += self._blocks.take(sequence.take().all_parts)
        if not sequence.is_finished:
            return encoded(events)
        events += self._blocks.close()
        if (error := cut_off(sequence)) is not None:
            return encoded([*events, error_of(error, self._request_id)])
        stop = StopDelta(self._stop_reason(sequence), self._stop_sequence(sequence))
        return encoded([*events, MessageDelta(stop, usage_of(sequence)), MessageStop()])

    def named(self, error: RequestError) -> RequestError:
        return self._translation.restore(error)

    def failed(self, error: RequestError) -> bytes:
        return encoded([error_of(self.named(error), self._request_id)])

    def whole(self, generation: Generation) -> AnthropicMessage:
        (sequence,) = generation.sequences
        if (error := cut_off(sequence)) is not None:
            raise error
        self._blocks.take(sequence.take().all_parts)
        self._blocks.close()
        return self._message(sequence, is_begun=True)

    def _message(self, sequence: OpenSequence, is_begun: bool) -> AnthropicMessage:
        message = AnthropicMessage(id=self._id, model=self._model_name, content=[], usage=usage_of(sequence))
        if is_begun:
            message.content = self._blocks.blocks
            message.stop_reason, message.stop_sequence = self._stop_reason(sequence), self._stop_sequence(sequence)
        else:
            message.usage.output_tokens, message.usage.output_tokens_details = 0, UNSET
        return message

    def _stop_reason(self, sequence: OpenSequence) -> StopReason:
        if sequence.finish_reason == "length":
            is_asked = len(sequence.delivered) >= sequence.generation.shared.sampling.max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded"
        if sequence.num_calls:
            return "tool_use"
        return "stop_sequence" if self._stop_sequence(sequence) is not None else "end_turn"

    def _stop_sequence(self, sequence: OpenSequence) -> str | None:
        return sequence.stop_reason if isinstance(sequence.stop_reason, str) else None


def usage_of(sequence: OpenSequence) -> MessageUsage:
    return MessageUsage(
        input_tokens=sequence.num_prompt_tokens - sequence.num_cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=sequence.num_cached_tokens,
        output_tokens=len(sequence.delivered),
        output_tokens_details=OutputTokensDetails(sequence.num_reasoning_tokens) if sequence.num_reasoning_tokens else UNSET,
    )


def encoded(events: Iterable[MessageEvent]) -> bytes:
    tagged = ((cast(str, event.__struct_config__.tag).encode(), event) for event in events)
    return b"".join(b"event: %b\ndata: %b\n\n" % (tag, encoder.encode(event)) for tag, event in tagged)

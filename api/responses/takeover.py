"""Generates a background response again after its HTTP process died, for the same reader.

Runs in the api process, which has claimed the response (`background.py`). The request is the client's, with the seed that was
chosen for it, so the answer is the same.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.types import Message, Scope

from api.access import GIVEN_KEY, Given
from api.client.generation import Generation
from api.request_context import ABORT_KEY, SCOPE_KEY, RequestContext, Services
from api.responses.requests import InputTokensRequest, ResponsesRequest
from api.responses.response import ResponseWriter
from api.responses.sent_events import SentEvents
from api.responses.store import ResponseStore, StoredRequest, StoredResponse
from api.responses.truncation import fitted
from api.schemas.requests import convert
from api.submission import RANK_HEADER
from api.translation import open_translated


class _Known(msgspec.Struct):
    id: str
    created_at: int
    status: str


async def opened(services: Services, stored: StoredResponse, asked: StoredRequest) -> tuple[Generation, ResponseWriter]:
    """Submit the request of a stored response again; return it and the writer of the response. Raises RequestError."""
    known = msgspec.json.decode(stored.response, type=_Known)
    context = RequestContext(services, stored.key, stored.key, asked.source)
    context.arrival_ns = asked.arrival_ns
    request = Request(_scope(context, asked), _never)
    fields = msgspec.json.decode(asked.fields) | {"input": msgspec.json.decode(stored.items)}
    body = convert(fields, ResponsesRequest)
    whole = convert({"input": fields["input"]}, InputTokensRequest)
    assert isinstance(whole.input, list)
    translation = await fitted(request, body, whole.input, asked.num_past)
    translation.add_ours(fields, ResponsesRequest)
    translation.fields |= {"stream": True, "seed": asked.seed}
    sent = SentEvents(services.feature(ResponseStore).cut_events(known.id)) if asked.is_streaming else None
    name = services.model.resolve(body.model)
    writer = ResponseWriter(context, name, fields, body, translation, known.id, sent)
    writer.response.created_at, writer.response.status = known.created_at, known.status  # type: ignore[assignment]
    generation = await open_translated(request, translation)
    generation.keeps_logprobs = True
    await generation.wait()
    generation.stir()  # for the next waiter
    return generation, writer


def _scope(context: RequestContext, asked: StoredRequest) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/responses",
        "query_string": b"",
        "headers": [(RANK_HEADER.encode(), str(asked.replica).encode())] if asked.replica >= 0 else [],
        "client": None,
        SCOPE_KEY: context,
        ABORT_KEY: lambda: None,
        GIVEN_KEY: Given(asked.source, asked.priority),
    }


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("no client disconnects")

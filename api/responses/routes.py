"""`/v1/responses`: create, get, delete, input_tokens. Runs in the api process."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.exchange import Exchange, until_finished
from api.responses.answers import DeletedResponse, InputTokens
from api.responses.conversation import translate
from api.responses.requests import InputTokensRequest, ResponsesRequest
from api.responses.response import ResponseWriter, StoredResponse
from api.schemas import requests
from api.schemas.requests import invalid, shown
from api.sse import EventStream
from api.translation import Translation, count_translated, open_translated
from engine.errors import RequestError

MAX_ITEMS = 4096  # of a conversation, with what it goes on from

T = TypeVar("T", bound=InputTokensRequest)


async def create_response(request: Request) -> Response:
    """The route."""
    exchange = Exchange.of(request)
    fields, body, translation = await _read(request, ResponsesRequest)
    translation.add_ours(fields, ResponsesRequest)
    name = exchange.services.model.resolve(body.model)
    writer = ResponseWriter(exchange, name, fields, body, translation)
    generation = await open_translated(request, translation)
    if body.stream:
        generation.keeps_logprobs = True  # for its last events
        return EventStream(generation, writer)
    with translation.restored():
        await until_finished(generation, request.receive)
    return json_response(writer.whole(generation), headers=generation.headers)


async def count_input_tokens(request: Request) -> Response:
    """The route."""
    _, _, translation = await _read(request, InputTokensRequest)
    return json_response(InputTokens(await count_translated(request, translation)))


async def get_response(request: Request) -> Response:
    """The route."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise invalid("stream", "a response that is over is no stream; leave it out")
    stored = _stored(request, request.path_params["id"])
    if stored is None:
        raise _not_found(request.path_params["id"])
    return Response(bytes(stored.response), media_type="application/json")


async def delete_response(request: Request) -> Response:
    """The route."""
    response_id = request.path_params["id"]
    if not Exchange.of(request).services.responses.delete(response_id):
        raise _not_found(response_id)
    return json_response(DeletedResponse(response_id))


async def _read(request: Request, type_: type[T]) -> tuple[dict[str, Any], T, Translation]:
    """The fields of a body, whose `input` becomes all items of the conversation; the body; and its chat request."""
    exchange = Exchange.of(request)
    fields = await exchange.fields(request)
    _complete(fields)
    body = requests.convert(fields, type_)
    await asyncio.sleep(0)  # what comes next may take as long
    past: list[Any] = []
    if body.previous_response_id is not None:
        stored = _stored(request, body.previous_response_id)
        if stored is None:
            raise RequestError(
                f"previous_response_id: there is no response {shown(body.previous_response_id)} (any more); send its items",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        past = msgspec.json.decode(stored.items)
    fields["input"] = [*past, *fields["input"]]
    if len(fields["input"]) > MAX_ITEMS:
        raise invalid("input", f"a conversation of {len(fields['input'])} items, the limit is {MAX_ITEMS}; send fewer")
    whole = requests.convert({"input": fields["input"]}, InputTokensRequest)
    assert isinstance(whole.input, list)
    if not whole.input:
        raise RequestError("input is required", code="missing_required_parameter", param="input")
    return fields, body, translate(body, whole.input, len(past))


def _complete(fields: dict[str, Any]) -> None:
    """A text is a user's message; an item with a role, and no type, is a message."""
    given = fields.get("input")
    if isinstance(given, str):
        fields["input"] = [{"type": "message", "role": "user", "content": given}]
    elif given is None:
        fields["input"] = []
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and "role" in item:
            item.setdefault("type", "message")


def _stored(request: Request, response_id: str) -> StoredResponse | None:
    data = Exchange.of(request).services.responses.load(response_id)
    return None if data is None else msgspec.json.decode(data, type=StoredResponse)


def _not_found(response_id: str) -> RequestError:
    text = f"there is no response {shown(response_id)}: it was not stored, was deleted, or had to make room"
    return RequestError(text, status=404, code="not_found", param="id")

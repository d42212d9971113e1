"""`/v1/responses`: create, get, cancel, delete, input items, compact, input_tokens. Runs in the api process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.client.generation import DROPPED_HEADER, Generation
from api.errors import json_response
from api.paging import page_of, whole_number
from api.request_context import RequestContext, until_finished
from api.responses.answers import CompactedResponse, DeletedResponse, InputItems, InputTokens
from api.responses.background import BackgroundResponses, is_open, with_status
from api.responses.conversation import ResponseTranslation
from api.responses.input_items import identified
from api.responses.items import Items, ids_of
from api.responses.requests import InputTokensRequest, ResponsesRequest
from api.responses.response import ResponseWriter, usage_of
from api.responses.store import ResponseStore, StoredRequest, StoredResponse
from api.responses.stored_events import StoredEvents
from api.responses.truncation import fitted
from api.schemas import requests
from api.schemas.requests import dump, invalid, shown
from api.schemas.responses import encoder
from api.sse import EventStream
from api.translation import count_translated, cut_off, open_translated
from engine.errors import ControlError, RequestError
from engine.messages import AbortRequest
from engine.process.log import printable

MAX_ITEMS = 4096  # of a conversation, including previous responses
MAX_REFERRED = 64  # items of a response that an item_reference can name
CANCEL_TIMEOUT_S = 30.0
MAX_EVENT_NUMBER = 999_999_999

MAX_LOGGED = 64  # different sets
_logged: set[str] = set()

T = TypeVar("T", bound=InputTokensRequest)


async def create_response(request: Request) -> Response:
    """Handle `POST /v1/responses`."""
    context = RequestContext.of(request)
    fields, body, translation, num_past = await _read(request, ResponsesRequest)
    translation.add_ours(fields, ResponsesRequest)
    name = context.services.model.resolve(body.model)
    if body.background:
        if body.store is False:
            raise invalid("background", "conflicts with store false, which allows no fetching; remove one of them")
        context.services.feature(BackgroundResponses).check_room(context.source)
        translation.fields["stream"] = True
    writer = ResponseWriter(context, name, fields, body, translation)
    headers = _headers(context, translation)
    generation = await open_translated(request, translation)
    if generation.dropped:
        generation.dropped = [*headers.values(), *generation.dropped]
        headers = {DROPPED_HEADER: ", ".join(generation.dropped)}
    if body.background:
        generation.keeps_logprobs = True
        context.services.feature(BackgroundResponses).begin(generation, writer, _asked(generation, fields, body, num_past))
        if body.stream:
            return StoredEvents(context.services, writer.response.id, headers=headers)
        return json_response(writer.response, headers=headers)
    if body.stream:
        generation.keeps_logprobs = True  # for its last events
        return EventStream(generation, writer, headers)
    with translation.restored():
        await until_finished(generation, request.receive)
    return json_response(writer.whole(generation), headers=headers | generation.headers)


async def compact_conversation(request: Request) -> Response:
    """Handle the route: return the user's messages and a summary, to continue from."""
    context = RequestContext.of(request)
    fields, _, translation, _ = await _read(request, InputTokensRequest, compacts=True)
    generation = await open_translated(request, translation)
    with translation.restored():
        await until_finished(generation, request.receive)
    (sequence,) = generation.sequences
    if (error := cut_off(sequence)) is not None:
        raise error
    response_id = context.services.feature(ResponseStore).new_id(context.source)
    items = Items(response_id, translation.tools, seals_reasoning=False, compacts=True)
    items.take(sequence.take().all_parts, [])
    items.close()
    kept = [item for item in fields["input"] if item.get("type") == "message" and item.get("role") == "user"]
    answer = CompactedResponse(
        id=response_id,
        created_at=int(time.time()),
        output=[msgspec.Raw(encoder.encode(item)) for item in [*kept, *items.items]],
        usage=usage_of(sequence),
    )
    return json_response(answer, headers=_headers(context, translation) | generation.headers)


async def count_input_tokens(request: Request) -> Response:
    """Handle `POST /v1/responses/input_tokens`."""
    _, _, translation, _ = await _read(request, InputTokensRequest)
    return json_response(InputTokens(await count_translated(request, translation)))


async def get_response(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}`."""
    context = RequestContext.of(request)
    response_id = request.path_params["id"]
    stored = _found(request, response_id)
    stream = request.query_params.get("stream", "false").lower()
    if stream not in ("true", "1", "false", "0"):
        raise invalid("stream", f"expected true or false, got {shown(stream)}")
    if stream in ("false", "0"):
        shown_now = with_status(stored, context.services.feature(BackgroundResponses).is_lost(response_id, stored))
        return Response(shown_now, media_type="application/json")
    if context.services.feature(ResponseStore).events(response_id, 0) is None:
        raise invalid("stream", "only responses created with background and stream can be streamed; remove it")
    after = request.query_params.get("starting_after")
    begin = whole_number("starting_after", after, 0, MAX_EVENT_NUMBER) + 1 if after else 0
    return StoredEvents(context.services, response_id, begin)


async def cancel_response(request: Request) -> Response:
    """Handle the route: end a background response, and return it."""
    response_id = request.path_params["id"]
    stored = _found(request, response_id)
    if not msgspec.json.decode(stored.response)["background"]:
        raise invalid("id", f"{shown(response_id)} was not created with background; only background responses can be cancelled")
    stored = await _ended(request, response_id, stored)
    is_lost = RequestContext.of(request).services.feature(BackgroundResponses).is_lost(response_id, stored)
    return Response(with_status(stored, is_lost), media_type="application/json")


async def list_input_items(request: Request) -> Response:
    """Handle the route: return the input of a response, including previous responses."""
    response_id = request.path_params["id"]
    stored = _found(request, response_id)
    items = msgspec.json.decode(stored.items)
    num_made = len(msgspec.json.decode(stored.response)["output"])
    items = [identified(response_id, index, item) for index, item in enumerate(items[: len(items) - num_made])]
    return json_response(page_of(InputItems, request.query_params, items, lambda item: item["id"], usual=20, most=100))


async def delete_response(request: Request) -> Response:
    """Handle `DELETE /v1/responses/{id}`."""
    response_id = request.path_params["id"]
    await _ended(request, response_id, _found(request, response_id))
    if not RequestContext.of(request).services.feature(ResponseStore).delete(response_id):
        raise _not_found(response_id)
    return json_response(DeletedResponse(response_id))


async def _read(request: Request, type_: type[T], compacts: bool = False) -> tuple[dict[str, Any], T, ResponseTranslation, int]:
    """Return the fields of a body, with all items of the conversation as `input`; the body; its chat request; and the number of
    items of earlier responses."""
    context = RequestContext.of(request)
    fields = await context.fields(request)
    _complete(fields)
    body = requests.convert(fields, type_)
    await asyncio.sleep(0)  # the next steps may take as long
    past: list[Any] = []
    if body.previous_response_id is not None:
        stored = _stored(request, body.previous_response_id)
        if stored is None:
            raise RequestError(
                (
                    f"previous_response_id: response {shown(body.previous_response_id)} does not exist or was removed; "
                    "send its items"
                ),
                code="previous_response_not_found",
                param="previous_response_id",
            )
        if is_open(stored):
            text = f"{shown(body.previous_response_id)} is still in progress; wait for it, or cancel it"
            raise invalid("previous_response_id", text)
        past = msgspec.json.decode(stored.items)
    fields["input"] = await asyncio.to_thread(_resolved, [*past, *fields["input"]], context.services.feature(ResponseStore))
    if len(fields["input"]) > MAX_ITEMS:
        raise invalid("input", f"the conversation has {len(fields['input'])} items, limit {MAX_ITEMS}; send fewer")
    whole = requests.convert({"input": fields["input"]}, InputTokensRequest)
    assert isinstance(whole.input, list)
    if not whole.input:
        raise RequestError("input is required", code="missing_required_parameter", param="input")
    translation = await fitted(request, body, whole.input, len(past), compacts)
    return fields, body, translation, len(past)


def _asked(generation: Generation, fields: dict[str, Any], body: ResponsesRequest, num_past: int) -> StoredRequest:
    """Return what another process needs to generate the response again."""
    shared = generation.shared
    seed = shared.sampling.seed
    return StoredRequest(
        fields=msgspec.Raw(dump({name: value for name, value in fields.items() if name != "input"}, "input")),
        num_past=num_past,
        is_streaming=bool(body.stream),
        source=shared.source,
        priority=shared.priority,
        replica=shared.pinned_replica,
        seed=seed - (1 << 64) if seed >= 1 << 63 else seed,
        arrival_ns=shared.arrival_ns,
    )


def _complete(fields: dict[str, Any]) -> None:
    """Normalize the input: a text is a user's message; an item with a role and no type is a message."""
    given = fields.get("input")
    if isinstance(given, str):
        fields["input"] = [{"type": "message", "role": "user", "content": given}]
    elif given is None:
        fields["input"] = []
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and item.get("type") is None and ("role" in item or "id" in item):
            item["type"] = "message" if "role" in item else "item_reference"


def _resolved(items: list[Any], store: ResponseStore) -> list[Any]:
    """Return the items with references replaced by items of stored responses; a reference to none stays."""
    wanted = {item["id"] for item in items if isinstance(item, dict) and item.get("type") == "item_reference" and "id" in item}
    found: dict[Any, Any] = {}
    if wanted:
        for response_id in store.ids():
            for index in range(MAX_REFERRED):
                item_ids = wanted & ids_of(response_id, index)
                if item_ids:
                    stored = msgspec.json.decode(store.load(response_id) or b"null", type=StoredResponse | None)
                    output = msgspec.json.decode(stored.response)["output"] if stored is not None else []
                    found |= {item["id"]: item for item in output if item["id"] in wanted}
            if len(found) == len(wanted):
                break
    is_reference = [isinstance(item, dict) and item.get("type") == "item_reference" for item in items]
    return [found.get(item.get("id"), item) if is_one else item for item, is_one in zip(items, is_reference, strict=True)]


def _headers(context: RequestContext, translation: ResponseTranslation) -> dict[str, str]:
    """Return headers that name the parts of a body that are not in the prompt. A log line does so too, once for each set of
    names."""
    if not translation.dropped:
        return {}
    dropped = printable(", ".join(translation.dropped)[:1024]).encode("ascii", "replace").decode()
    if dropped not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(dropped)
        context.services.context.log.info("dropped items from the prompt of request %s: %s", context.request_id, dropped)
    return {DROPPED_HEADER: dropped}


def _stored(request: Request, response_id: str) -> StoredResponse | None:
    data = RequestContext.of(request).services.feature(ResponseStore).load(response_id)
    return None if data is None else msgspec.json.decode(data, type=StoredResponse)


def _found(request: Request, response_id: str) -> StoredResponse:
    stored = _stored(request, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


async def _ended(request: Request, response_id: str, stored: StoredResponse) -> StoredResponse:
    """Return a background response after ending it, in whichever process it is."""
    services = RequestContext.of(request).services
    deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
    aborted = ""
    while is_open(stored) and not services.feature(BackgroundResponses).is_lost(response_id, stored):
        if time.monotonic() > deadline_s:
            raise RequestError(f"{shown(response_id)} did not stop within {CANCEL_TIMEOUT_S:g} s; try again", status=503)
        if aborted != stored.key:  # at first, and if another process has taken it over since
            if services.client.abort(stored.key):
                aborted = stored.key
            else:
                with contextlib.suppress(ControlError):
                    await services.control.ask_async(AbortRequest(stored.key), CANCEL_TIMEOUT_S)
                    aborted = stored.key
        await services.feature(BackgroundResponses).change()
        stored = _found(request, response_id)
    return stored


def _not_found(response_id: str) -> RequestError:
    text = f"response {shown(response_id)} does not exist: it was not stored, was deleted, or was removed to make room"
    return RequestError(text, status=404, code="not_found", param="id")

"""`/v1/batches`: create, list, show, cancel. Runs in the api process.

A list shows only the client's own batches. The id of a batch is random, and grants access to it.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.batches.batch import OPEN, WINDOW_S, Batch, CreateBatchRequest, RequestCounts, StoredBatch, count_requests
from api.batches.runner import BatchRunner
from api.errors import json_response
from api.files.store import FileStore, no_room
from api.paging import Page, page_of
from api.request_context import RequestContext
from api.schemas.requests import invalid, shown
from engine.errors import RequestError

MAX_OPEN = 16  # per user
MAX_STORED = 256  # then the oldest finished one is removed


class BatchList(Page[Batch]):
    pass


async def create_batch(request: Request) -> Response:
    """Handle the route. Raises 400 for a file with an invalid line."""
    context = RequestContext.of(request)
    files, batches = context.services.feature(FileStore), context.services.feature(BatchRunner)
    body = await context.parse(request, CreateBatchRequest)
    file = files.find(body.input_file_id)
    if file is None:
        text = f"file {shown(body.input_file_id)} does not exist; upload it with purpose 'batch'"
        raise RequestError(f"input_file_id: {text}", status=404, code="not_found", param="input_file_id")
    if file.purpose != "batch":
        raise invalid("input_file_id", f"the purpose of the file is {shown(file.purpose)}, expected 'batch'")
    own = batches.of_source(context.source)
    num_open = sum(batch.status in OPEN for batch in own)
    if num_open >= MAX_OPEN:
        raise RequestError(
            (f"too many batches: {num_open} of yours are in progress, limit {MAX_OPEN}; wait for one to finish, or cancel one"),
            status=429,
            code="too_many_batches",
            retry_after_s=60,
        )
    max_line_bytes = context.services.context.config.max_body_bytes  # longer lines would be rejected later
    total = await asyncio.to_thread(count_requests, files.path(file.id), body.endpoint, max_line_bytes)
    files.check_room(files.owner_of(context.source))
    now = int(time.time())
    batch = Batch(
        id=files.new_id("batch_", context.source),
        endpoint=body.endpoint,
        input_file_id=file.id,
        created_at=now,
        expires_at=now + WINDOW_S,
        request_counts=RequestCounts(total=total),
        metadata=body.metadata,
    )
    output_id, error_id = files.new_id("file-", context.source), files.new_id("file-", context.source)
    over = [each.id for each in own if each.status not in OPEN]
    for batch_id in over[: max(0, len(own) + 1 - MAX_STORED)]:
        batches.forget(batch_id)
    try:
        if file.expires_at is not None and file.expires_at < batch.expires_at:  # it is read until then
            files.add(msgspec.structs.replace(file, expires_at=batch.expires_at))
        batches.add(StoredBatch(batch=batch, output_id=output_id, error_id=error_id))
    except OSError as error:
        raise no_room(error) from error
    return json_response(batch)


async def list_batches(request: Request) -> Response:
    """Handle `GET /v1/batches`."""
    context = RequestContext.of(request)
    own = context.services.feature(BatchRunner).of_source(context.source)
    return json_response(page_of(BatchList, request.query_params, own, lambda batch: batch.id, usual=20, most=100))


async def show_batch(request: Request) -> Response:
    """Handle `GET /v1/batches/{id}`."""
    return json_response(_found(request))


async def cancel_batch(request: Request) -> Response:
    """Handle the route: answers so far are kept."""
    batches = RequestContext.of(request).services.feature(BatchRunner)
    batch = _found(request)
    if batch.status == "cancelled":
        return json_response(batch)
    if batch.status not in OPEN:
        raise RequestError(f"the batch is {batch.status} and cannot be cancelled", status=409, code="batch_over", param="id")
    try:
        batches.cancel(batch.id)
    except OSError as error:
        raise no_room(error) from error
    return json_response(_found(request))


def _found(request: Request) -> Batch:
    batch_id = request.path_params["id"]
    stored = RequestContext.of(request).services.feature(BatchRunner).find(batch_id)
    if stored is None:
        text = f"batch {shown(batch_id)} does not exist, or belongs to another run"
        raise RequestError(text, status=404, code="not_found", param="id")
    return stored.batch

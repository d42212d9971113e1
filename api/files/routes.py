"""`/v1/files`: upload, list, show, content, delete. Runs in the api process.

A list has the files of who asks; a file is found by its id, which nobody can guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from api.errors import json_response
from api.exchange import Exchange
from api.files.store import FileObject
from api.files.upload import take_upload, whole_number
from api.schemas.requests import invalid, shown
from engine.errors import RequestError


class FileList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class _Listed(Protocol):
    id: str
    created_at: int


L = TypeVar("L", bound=_Listed)


async def create_file(request: Request) -> Response:
    """The route."""
    return json_response(await take_upload(request, Exchange.of(request).services.files))


async def list_files(request: Request) -> Response:
    """The route."""
    exchange = Exchange.of(request)
    store = exchange.services.files
    found = [file for each in store.ids("file-", exchange.source) if (file := store.find(each)) is not None]
    purpose = request.query_params.get("purpose")
    page, has_more = page_of(request, [file for file in found if purpose in (None, file.purpose)], 10_000, 10_000)
    first_id, last_id = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(FileList(data=page, first_id=first_id, last_id=last_id, has_more=has_more))


async def show_file(request: Request) -> Response:
    """The route."""
    return json_response(_found(request))


async def show_content(request: Request) -> Response:
    """The route: a file's bytes, as it was uploaded."""
    file = _found(request)
    path = Exchange.of(request).services.files.path(file.id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(request: Request) -> Response:
    """The route. 409 while a batch reads it."""
    services = Exchange.of(request).services
    file = _found(request)
    batch_id = services.batches.reader_of(file.id)
    if batch_id is not None:
        text = f"the file is read by {batch_id}; cancel that, or wait for it"
        raise RequestError(text, status=409, code="file_in_use", param="id")
    services.files.delete(file.id)
    return json_response(DeletedFile(file.id))


def page_of(request: Request, found: Sequence[L], most: int, usual: int) -> tuple[list[L], bool]:
    """The part of a list that a query asks for, the newest first, and whether there is more."""
    query = request.query_params
    text, order, after = query.get("limit") or str(usual), query.get("order", "desc"), query.get("after")
    limit = whole_number("limit", text, 1, most)
    if order not in ("asc", "desc"):
        raise invalid("order", f"expected 'asc' or 'desc', got {shown(order)}")
    key: Callable[[L], Any] = lambda each: (each.created_at, each.id)  # noqa: E731
    listed = sorted(found, key=key, reverse=order == "desc")
    if after:
        ids = [each.id for each in listed]
        if after not in ids:
            raise invalid("after", f"{shown(after)} is the id of nothing here; leave it out, or send a last_id")
        listed = listed[ids.index(after) + 1 :]
    return listed[:limit], len(listed) > limit


def _found(request: Request) -> FileObject:
    file_id = request.path_params["id"]
    file = Exchange.of(request).services.files.find(file_id)
    if file is None:
        text = f"there is no file {shown(file_id)}: it was deleted, has expired, or is of another run"
        raise RequestError(text, status=404, code="not_found", param="id")
    return file

"""`/v1/files`: upload, list, show, content, delete. Runs in the api process.

A list shows only the client's own files. The id of a file is random, and grants access to it.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from api.errors import json_response
from api.files.store import FileObject, FileStore
from api.files.upload import take_upload
from api.paging import Page, page_of
from api.request_context import RequestContext
from api.schemas.requests import shown
from engine.errors import RequestError


class FileList(Page[FileObject]):
    pass


class DeletedFile(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


async def create_file(request: Request) -> Response:
    """Handle `POST /v1/files`."""
    return json_response(await take_upload(request, RequestContext.of(request).services.feature(FileStore)))


async def list_files(request: Request) -> Response:
    """Handle `GET /v1/files`."""
    context = RequestContext.of(request)
    store = context.services.feature(FileStore)
    found = [file for each in store.ids("file-", context.source) if (file := store.find(each)) is not None]
    purpose = request.query_params.get("purpose")
    listed = sorted((file for file in found if purpose in (None, file.purpose)), key=lambda file: (file.created_at, file.id))
    return json_response(page_of(FileList, request.query_params, listed, lambda file: file.id, usual=10_000, most=10_000))


async def show_file(request: Request) -> Response:
    """Handle `GET /v1/files/{id}`."""
    return json_response(_found(request))


async def show_content(request: Request) -> Response:
    """Handle the route: return a file's bytes, as uploaded."""
    file = _found(request)
    path = RequestContext.of(request).services.feature(FileStore).path(file.id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(request: Request) -> Response:
    """Handle the route. Raises 409 while a batch reads the file."""
    services = RequestContext.of(request).services
    file = _found(request)
    batch_id = services.feature(FileStore).reader_of(file.id)
    if batch_id is not None:
        text = f"the file is used by {batch_id}; cancel that, or wait for it"
        raise RequestError(text, status=409, code="file_in_use", param="id")
    services.feature(FileStore).delete(file.id)
    return json_response(DeletedFile(file.id))


def _found(request: Request) -> FileObject:
    file_id = request.path_params["id"]
    file = RequestContext.of(request).services.feature(FileStore).find(file_id)
    if file is None:
        text = f"file {shown(file_id)} does not exist: it was deleted, has expired, or belongs to another run"
        raise RequestError(text, status=404, code="not_found", param="id")
    return file

"""A multipart body with a file, written to disk while it is received. Runs in the api process."""

from __future__ import annotations

import logging
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api.body_budget import GRACE_NS, LEAST_BODY_BYTES_PER_S
from api.files.store import FileObject, FileStore, Purpose, Upload
from api.paging import whole_number
from api.request_context import RequestContext, next_part
from api.schemas.requests import convert, invalid, shown
from engine.errors import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it repeats client data that is in the answer too

MAX_OVERHEAD_BYTES = 64 << 10  # of a body, in addition to its file
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
MAX_NAME_BYTES = 255


class UploadFields(msgspec.Struct, kw_only=True):
    purpose: Purpose


class _Parts:
    """Events of `MultipartParser`."""

    def __init__(self, store: FileStore, source: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.upload: Upload | None = None
        self._store, self._source = store, source
        self._num_parts = 0
        self._header, self._value = b"", b""
        self._disposition = b""
        self._name: str | None = None  # of a field; None: the part is the file
        self._field = b""

    def on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid("the body", f"more than {MAX_PARTS} parts, the limit")
        self._disposition, self._field = b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = _text(options.get(b"name", b""), "the name of a part")
        if b"filename" not in options:
            self._name = name
            return
        if name != "file" or self.upload is not None:
            raise invalid(name or "file", "expected one file, in part `file`")
        self._name, self.filename = None, _checked_name(_text(options[b"filename"], "file"))
        self.upload = Upload(self._store, self._source)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None and self.upload is not None:
            self.upload.write(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise invalid(self._name or "the body", f"exceeds the limit of {MAX_FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        if self._name is not None:
            self.fields[self._name] = _text(self._field, self._name)


async def take_upload(request: Request, store: FileStore) -> FileObject:
    """Store the file of a body. Raises RequestError, and then keeps nothing of it."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError("expected a multipart/form-data body with `file` and `purpose`", param="file")
    parts = _Parts(store, RequestContext.of(request).source)
    callbacks: MultipartCallbacks = {
        "on_part_begin": parts.on_part_begin,
        "on_part_data": parts.on_part_data,
        "on_part_end": parts.on_part_end,
        "on_header_field": parts.on_header_field,
        "on_header_value": parts.on_header_value,
        "on_header_end": parts.on_header_end,
        "on_headers_finished": parts.on_headers_finished,
    }
    begin_ns = time.monotonic_ns()
    num_bytes = 0
    try:
        parser = MultipartParser(boundary, callbacks)
        is_last = False
        while not is_last:
            data, is_last = await next_part(request.receive, _seconds_left(begin_ns, num_bytes))
            if data:
                parser.write(data)
            num_bytes += len(data)
            if num_bytes - (parts.upload.num_bytes if parts.upload is not None else 0) > MAX_OVERHEAD_BYTES:
                raise invalid(
                    "the body", f"more than {MAX_OVERHEAD_BYTES} bytes in addition to the file; send only `file` and `purpose`"
                )
        parser.finalize()
        if parts.upload is None:
            raise RequestError("file is required", code="missing_required_parameter", param="file")
        purpose = convert(dict(parts.fields), UploadFields).purpose
        if purpose == "batch_output":
            raise invalid("purpose", "'batch_output' is reserved for the server; send 'batch' or another purpose")
        return parts.upload.finish(parts.filename, purpose, _expiry(parts.fields))
    except FormParserError as error:
        raise RequestError(f"the body is not valid multipart/form-data: {error}"[:300], param="file") from None
    finally:
        if parts.upload is not None:
            parts.upload.drop()


def _seconds_left(begin_ns: int, num_bytes: int) -> float:
    """Return the seconds left for more of a body that began at `begin_ns` (CLOCK_MONOTONIC) and has `num_bytes` so far."""
    now_ns = time.monotonic_ns()
    due_ns = begin_ns + num_bytes * 1_000_000_000 // LEAST_BODY_BYTES_PER_S
    return (min(due_ns, now_ns) + GRACE_NS - now_ns) / 1e9


def _expiry(fields: dict[str, str]) -> int | None:
    text = fields.get("expires_after[seconds]")
    if text is None:
        return None
    return int(time.time()) + whole_number("expires_after.seconds", text, 3600, 2592000)


def _text(data: bytes, param: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(param, "expected UTF-8") from None


def _checked_name(name: str) -> str:
    """Return a name without a path: it is stored as text, and never used as a path."""
    is_plain = name.isprintable() and "\\" not in name and PurePosixPath(name).name == name != ".."
    if not is_plain or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise invalid("file", f"expected a file name of 1 to {MAX_NAME_BYTES} bytes without directories, got {shown(name)}")
    return name

"""A batch and its state, in OpenAI's format, and the check of its file. Pure except for that file."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from api.batches.lines import MAX_LINE_BYTES, ROUTES, Route, requests_in
from api.schemas.requests import shown
from engine.errors import RequestError

MAX_REQUESTS = 50_000
MAX_METADATA = 16
WINDOW_S = 24 * 3600

Status = Literal["in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
OPEN: tuple[Status, ...] = ("in_progress", "finalizing", "cancelling")
END = {"completed": "completed_at", "failed": "failed_at", "expired": "expired_at", "cancelled": "cancelled_at"}


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "in_progress"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None

    def end(self, status: Status) -> None:
        """Set the final status and its time."""
        self.status = status
        setattr(self, END[status], int(time.time()))


class StoredBatch(msgspec.Struct, kw_only=True):
    batch: Batch
    output_id: str  # ids of the files with answers, once there is one
    error_id: str


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class CreateBatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: Route
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


def count_requests(path: Path, endpoint: str, max_line_bytes: int = MAX_LINE_BYTES) -> int:
    """Count the requests in a file, which must all be valid and for `endpoint`. Raises RequestError that names the first
    invalid line."""
    assert endpoint in ROUTES
    seen: dict[bytes, int] = {}  # hashes, because ids may be long
    num_requests = 0
    try:
        for request in requests_in(path, max_line_bytes):
            num_requests += 1
            if request.error is not None:
                raise _wrong(request.error.message)
            if request.url != endpoint:
                raise _wrong(f"line {request.number}: url is {shown(request.url)}, but the endpoint of the batch is {endpoint}")
            key = hashlib.blake2b((request.custom_id or "").encode(errors="surrogatepass"), digest_size=16).digest()
            first = seen.setdefault(key, request.number)
            if first != request.number:
                raise _wrong(f"lines {first} and {request.number} have the same custom_id, {shown(request.custom_id)}")
            if num_requests > MAX_REQUESTS:
                raise _wrong(f"more than {MAX_REQUESTS} requests, the limit; send several batches")
    except OSError as error:
        raise _wrong(f"the file cannot be read: {error.strerror}") from error
    if not num_requests:
        raise _wrong("the file has no requests; write one request per line")
    return num_requests


def _wrong(what: str) -> RequestError:
    return RequestError(f"input_file_id: {what}", code="invalid_batch_file", param="input_file_id")

"""The lines of a batch: requests in OpenAI's format, and their answers.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {}}, "error": null}

An invalid line gets an answer too: `response` is null, and `error` says what is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Protocol, get_args

import msgspec
import orjson

Route = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/score",
    "/v1/responses",
]
ROUTES: tuple[str, ...] = get_args(Route)
MAX_LINE_BYTES = 256 << 20
ANSWER_BEGINS = b'{"id":"batch_req_'
_MARGIN = 128  # levels: the recursion depth of a reader counts too
_BOM = b"\xef\xbb\xbf"


class Reply(Protocol):
    """The response of a server."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...

    @property
    def request_id(self) -> str: ...


class Error(msgspec.Struct):
    code: str
    message: str


class Request(msgspec.Struct):
    """A line of the input: a request, unless there is an `error`. `number` counts the file's lines from 1."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: Error | None = None

    @property
    def answer_id(self) -> str:
        """Return the id of a line's answer: a hash of the whole request, so that an answer identifies its request."""
        said = self.error.message if self.error else ""
        parts = (self.custom_id or "", self.url, said)
        asked = b"\0".join([*(part.encode(errors="surrogatepass") for part in parts), self.body])
        return f"batch_req_{hashlib.blake2b(asked, digest_size=12).hexdigest()}"


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Name(msgspec.Struct):
    custom_id: str | None = None


class _Body(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Answer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: Error | None


_decoder, _names = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Name)
_bodies, _answers = msgspec.json.Decoder(_Body), msgspec.json.Decoder(_Answer)


def requests_in(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Request]:
    """Yield the requests of a file, malformed ones too; empty lines are skipped. Raises OSError."""
    with open(path, "rb") as file:
        for number, raw in enumerate(_lines(file, max_line_bytes), start=1):
            text = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
            if text:
                yield _request(number, text, max_line_bytes)


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines. Of a line that is too long, no more than the limit is read."""
    while raw := file.readline(max_bytes + 1):
        rest = raw
        while not rest.endswith(b"\n") and (rest := file.readline(max_bytes)):
            pass
        yield raw


def _request(number: int, text: bytes, max_bytes: int) -> Request:
    if len(text) > max_bytes:
        return _malformed(number, None, "line_too_long", f"longer than {max_bytes} bytes")
    try:
        custom_id = _names.decode(text).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _malformed(number, None, "invalid_json_line", str(error))
    try:
        line = _decoder.decode(text)
        asked = _bodies.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _malformed(number, custom_id, "invalid_request", str(error))
    if not line.custom_id:
        return _malformed(number, None, "invalid_request", "custom_id is empty")
    if line.method != "POST":
        return _malformed(number, custom_id, "invalid_method", f"method is {line.method[:20]!r}, expected 'POST'")
    if line.url not in ROUTES:
        return _malformed(number, custom_id, "invalid_url", f"url is {line.url[:200]!r}, expected one of {', '.join(ROUTES)}")
    if asked.stream or asked.background:
        name = "stream" if asked.stream else "background"
        return _malformed(
            number, custom_id, "invalid_request", f"body has {name}, which is not supported in batches; remove it"
        )
    return Request(number, custom_id, line.url, bytes(line.body))


def _malformed(number: int, custom_id: str | None, code: str, message: str) -> Request:
    return Request(number, custom_id, error=Error(code, f"line {number}: {message}"))


def answer_line(request: Request, reply: Reply | None) -> bytes:
    """Return the line that answers `request`; `reply` None: it is malformed."""
    response = None
    if reply is not None:
        response = _Response(reply.status, reply.request_id, msgspec.Raw(_in_one_line(reply.body)))
    return msgspec.json.encode(_Answer(request.answer_id, request.custom_id, response, request.error)) + b"\n"


class Answered(NamedTuple):
    """The answer to a line, and whether it succeeded."""

    answer_id: str  # `Request.answer_id`
    custom_id: str | None
    is_well: bool


def answered(line: bytes) -> Answered:
    """Read the answer in a line. Raises ValueError if it is none."""
    try:
        answer = _answers.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return Answered(answer.id, answer.custom_id, answer.response is not None and answer.response.status_code == 200)


def _in_one_line(body: bytes) -> bytes:
    """Return JSON unchanged, or as a text if it is not valid JSON, such as a proxy's page, or too deep to be read again within
    its line."""
    try:
        content = orjson.loads(body)
        msgspec.json.decode(b"[" * _MARGIN + body + b"]" * _MARGIN, type=msgspec.Raw)
    except (orjson.JSONDecodeError, msgspec.DecodeError, RecursionError):
        return orjson.dumps(body.decode(errors="replace"))
    return orjson.dumps(content) if b"\n" in body or b"\r" in body else body.strip()

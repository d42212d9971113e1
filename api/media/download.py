"""Fetches clients' links: in parallel, in order, and only from allowed hosts.

Used by `request.py` in the api process. `Fetcher.fetch` gets one link; `download` gets many, and stops at the first failure.
Allowed hosts are in `addresses.py`. Messages contain no addresses, and no more of a link than its client sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec

from api.media.addresses import Addresses, ForbiddenAddressError
from api.media.fetch_slots import FetchSlot, FetchSlots
from api.media.object_store import SCHEMES, ObjectStore, presigned
from engine.config import EngineConfig
from engine.errors import RequestError

if TYPE_CHECKING:
    import httpx2

PIECES_OF_A_TURN = 32  # pieces of an answer, after which others have a turn
MAX_REDIRECTS = 3
MAX_TRIES = 2
MAX_ADDRESSES = 3  # tried per host
MAX_LINKS = 256  # at once
MAX_FILE_READS = 16
RECEIVE_BYTES = 128 << 10  # receive buffer of a connection: the loop reads all of it before it is counted
MAX_LINK_CHARACTERS = 8192
VIDEO_FACTOR = 3  # timeout of a video, as a multiple
_USER_AGENT = "tokamak"
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (502, 503, 504)  # worth a retry
_PORTS = {"http": 80, "https": 443}

L = TypeVar("L")
T = TypeVar("T")


async def download(
    links: Sequence[L] | str, fetch: Callable[[L], Awaitable[T]], max_workers: int = 8
) -> AsyncGenerator[T | RequestError, None]:
    """Fetch the links with `fetch`, in order, `max_workers` at a time. After the first failure, or when the caller closes the
    iterator, waiting links are dropped and running fetches are cancelled."""
    waiting = deque[L]([links] if isinstance(links, str) else links)  # type: ignore[list-item]
    under_way = deque[asyncio.Future[T]]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < max(1, max_workers):
                under_way.append(asyncio.ensure_future(fetch(waiting.popleft())))
            try:
                yield await under_way[0]
            except RequestError as error:
                yield error
                return
            under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class _Link(msgspec.Struct, frozen=True):
    """A parsed link."""

    scheme: str
    host: str
    port: int
    target: str  # path and query
    is_trusted: bool = False  # of the operator's own store

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


class Fetcher:
    """Fetches links for one api process."""

    def __init__(self, config: EngineConfig, num_links: int | None = None) -> None:
        """`num_links`: at a time, if there are enough descriptors."""
        num_links = MAX_LINKS if num_links is None else max(1, min(MAX_LINKS, num_links))
        self._addresses = Addresses(config.allowed_media_networks)
        self._domains = frozenset(domain.lower().rstrip(".") for domain in config.allowed_media_domains)
        self._local_path = config.allowed_local_media_path
        self._store = ObjectStore.of(config)
        self._timeout_s = config.media_fetch_timeout_s
        self._transport: httpx2.AsyncHTTPTransport | None = None
        self._links = FetchSlots("media-link", num_links)
        self._files = FetchSlots("media-file", min(MAX_FILE_READS, num_links))

    async def fetch(
        self,
        link: str,
        max_bytes: int,
        *,
        is_video: bool = False,
        came: Callable[[int], None] = lambda num_bytes: None,
        source: object = None,
    ) -> bytearray:
        """Return the bytes of a link; links of one `source` share its slots. Raises RequestError, without `param`, if there are
        none or too many, or 429 if other links left it no slot; or the error of `came`, which is called with bytes before they
        are kept, and with a negative number when they are no longer kept."""
        timeout_s = self._timeout_s * (VIDEO_FACTOR if is_video else 1)
        scheme = link[:16].partition(":")[0].lower()
        fetched: Callable[[FetchSlot], Awaitable[bytearray]]
        if scheme == "file":
            slots = self._files
            fetched = lambda slot: slot.run(self._read_file, link, max_bytes)  # noqa: E731
        else:
            slots = self._links
            parsed = self._signed(link, scheme) if scheme in SCHEMES else _parsed(link)
            fetched = lambda slot: self._follow(parsed, max_bytes, came, slot)  # noqa: E731
        slot = await slots.take(object() if source is None else source, timeout_s)
        try:
            return await asyncio.wait_for(fetched(slot), timeout_s)
        except asyncio.TimeoutError:
            raise failed(f"did not answer completely within {timeout_s:g} s") from None
        finally:
            slot.release()

    async def close(self) -> None:
        self._links.close()
        self._files.close()
        if self._transport is not None:
            await self._transport.aclose()

    # -------------------------------------------------------------------------------------------------------------- http

    async def _follow(self, link: _Link, max_bytes: int, came: Callable[[int], None], slot: FetchSlot) -> bytearray:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._try(link, max_bytes, came, slot)
            if not isinstance(found, str):
                return found
            try:
                link = _parsed(urljoin(link.text, found))
            except ValueError:
                raise invalid_link("redirects to an invalid URL") from None
        raise invalid_link(f"redirects more than {MAX_REDIRECTS} times")

    async def _try(self, link: _Link, max_bytes: int, came: Callable[[int], None], slot: FetchSlot) -> bytearray | str:
        """Return the content, or the link that it redirects to; with retries if they may help."""
        if self._domains and link.host not in self._domains and not link.is_trusted:
            raise invalid_link(f"points to {link.host}, which is not in --allowed-media-domains")
        try:
            addresses = await self._addresses.resolve(link.host, link.port, link.is_trusted, slot)
        except ForbiddenAddressError:
            raise invalid_link(f"points to {link.host}, which is not a public host; see --allowed-media-networks") from None
        except (OSError, UnicodeError):
            raise failed(f"points to {link.host}, which has no address") from None
        for number in range(MAX_TRIES):
            try:
                return await self._get(link, addresses, max_bytes, came)
            except _Passing as error:
                if number + 1 == MAX_TRIES:
                    raise failed(str(error)) from None
        raise AssertionError

    async def _get(self, link: _Link, addresses: list[str], max_bytes: int, came: Callable[[int], None]) -> bytearray | str:
        import httpx2  # slow to import, not needed without links

        if self._transport is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)  # slots limit them
            options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)]
            self._transport = httpx2.AsyncHTTPTransport(trust_env=False, limits=limits, socket_options=options)
        for number, address in enumerate(addresses[:MAX_ADDRESSES], 1):
            try:
                return await self._get_from(self._transport, link, address, max_bytes, came)
            except httpx2.ConnectError:
                if number == min(len(addresses), MAX_ADDRESSES):
                    raise _Passing("could not be reached") from None
            except httpx2.HTTPError as error:
                raise _Passing(f"failed during transfer ({type(error).__name__})") from None
        raise AssertionError

    async def _get_from(
        self, transport: httpx2.AsyncHTTPTransport, link: _Link, address: str, max_bytes: int, came: Callable[[int], None]
    ) -> bytearray | str:
        import httpx2

        host = f"[{address}]" if ":" in address else address
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout_s)
        request = httpx2.Request(
            "GET",
            f"{link.scheme}://{host}:{link.port}{link.target}",
            headers={"host": link.authority, "accept": "*/*", "accept-encoding": "identity", "user-agent": _USER_AGENT},
            extensions={"timeout": timeout, "sni_hostname": link.host},
        )
        response = await transport.handle_async_request(request)
        try:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return response.headers["location"]
            if response.status_code in _PASSING:
                raise _Passing(f"returned status {response.status_code}")
            if response.status_code != 200:
                raise failed(f"returned status {response.status_code}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise failed("returned compressed content, which was not requested")
            return await read_content(response, max_bytes, came)
        finally:
            await response.aclose()

    # ------------------------------------------------------------------------------------------------------ stores, files

    def _signed(self, link: str, scheme: str) -> _Link:
        bucket, _, key = link[len(scheme) + 1 :].removeprefix("//").partition("/")
        if not bucket or not key or _has_forbidden(link):
            raise invalid_link(f"should be {scheme}://BUCKET/KEY")
        if not (self._store.access_key and self._store.secret_key):
            raise invalid_link(f"needs keys for {scheme}:, which this server does not have")
        key = unquote(key)
        if not {".", ".."}.isdisjoint((bucket, *key.split("/"))):  # a proxy could interpret them as directories
            raise invalid_link('has "." or ".." as a path segment, which is not allowed')
        if not self._store.is_allowed(bucket, key):
            raise invalid_link(f"uses an object in bucket {bucket[:63]!r}, which is not in --allowed-object-buckets")
        signed = _parsed(presigned(self._store, scheme, bucket, key, datetime.now(timezone.utc)), most=1 << 15)
        return _Link(signed.scheme, signed.host, signed.port, signed.target, is_trusted=bool(self._store.endpoint))

    def _read_file(self, link: str, max_bytes: int) -> bytearray:
        """Return a regular file below the allowed directory, even if symbolic links are changed meanwhile."""
        if not self._local_path:
            raise invalid_link("is a file: link, and the server was started without --allowed-local-media-path")
        host, slash, path = link[len("file:") :].removeprefix("//").partition("/")
        path = unquote(slash + path)
        root = os.path.realpath(self._local_path)
        if host not in ("", "localhost") or "\0" in path or not _is_beneath(path := os.path.realpath(path), root):
            raise invalid_link("is outside --allowed-local-media-path")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise invalid_link(f"cannot be opened: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not _is_beneath(os.readlink(f"/proc/self/fd/{descriptor}"), root):
                raise invalid_link("is not a regular file inside --allowed-local-media-path")
            content = bytearray()
            while len(content) <= max_bytes and (piece := os.read(descriptor, min(1 << 20, max_bytes + 1 - len(content)))):
                content += piece
        finally:
            os.close(descriptor)
        if len(content) > max_bytes:
            raise too_large(status.st_size, max_bytes)
        return content


class _Passing(Exception):
    """A failure that a retry may avoid."""


async def read_content(response: httpx2.Response, max_bytes: int, came: Callable[[int], None]) -> bytearray:
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large(int(length[:20]), max_bytes)
    content = bytearray()
    try:
        num_pieces = 0
        async for piece in response.aiter_raw():
            came(len(piece))
            content += piece
            num_pieces += 1
            if num_pieces % PIECES_OF_A_TURN == 0:  # a server may send thousands of pieces at once
                await asyncio.sleep(0)
            if len(content) > max_bytes:
                raise too_large(None, max_bytes)
    except BaseException:
        came(-len(content))
        content.clear()  # the error's traceback keeps this frame until garbage collection
        raise
    return content


def _parsed(text: str, most: int = MAX_LINK_CHARACTERS) -> _Link:
    """Parse an http link. Raises RequestError if it is invalid, or ambiguous between programs."""
    if len(text) > most or _has_forbidden(text):
        raise invalid_link(f"has a backslash, a space or a control character, or is longer than {most} characters")
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").rstrip(".")
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError:  # an open bracket, a port that is not a number, a name not allowed by IDNA
        raise invalid_link("is not a valid URL") from None
    if parts.scheme not in _PORTS:
        raise invalid_link(f"has the scheme {parts.scheme[:16]!r}; use http, https, data, s3, bos or, if enabled, file")
    if not host or "@" in parts.netloc or "%" in host or port == 0:
        raise invalid_link("has no host, or has a user name")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=-._~")
    query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=-._~?')}" if parts.query else ""
    if len(path) + len(query) > most:
        raise invalid_link(f"is longer than {most} characters when encoded")
    return _Link(parts.scheme, host.lower(), port or _PORTS[parts.scheme], path + query)


def _has_forbidden(text: str) -> bool:
    return "\\" in text or any(letter <= " " or letter == "\x7f" for letter in text)


def _is_beneath(path: str, root: str) -> bool:
    return os.path.commonpath((path, root)) == root


def invalid_link(why: str) -> RequestError:
    return RequestError(f"the link {why}", code="invalid_image_url")


def failed(why: str) -> RequestError:
    return RequestError(f"the link could not be fetched: it {why}", code="failed_to_download_image")


def too_large(num_bytes: int | None, max_bytes: int) -> RequestError:
    size = f"{num_bytes} bytes" if num_bytes is not None else "more"
    return RequestError(
        (f"the file has {size}, limit {max_bytes}; send a smaller file, or start the server with a larger --max-media-bytes"),
        code="image_file_too_large",
    )

"""The media of one HTTP request: fetched or decoded into the media slab, then inspected by a media process.

Runs in the event loop of the api process without blocking it for long: base64 is decoded in pieces, with a turn of the loop
after each. Limits are checked before the work that they prevent.
"""

from __future__ import annotations

import asyncio
import binascii
import time
from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request

from api.access import source_of
from api.client.generation import unless_gone
from api.media.download import MAX_LINKS, Fetcher, download, too_large
from api.media.parts import MediaPart, check_parts
from api.media.store import MediaLease, MediaStore
from api.schemas.requests import MediaOptions, dump
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import MediaItem, MediaSource
from engine.process.context import ActorContext
from shm.slab import SlabHandle

PIECE_CHARACTERS = 1 << 20  # of base64, decoded in one turn of the loop
MAX_FRAMES = 10_000  # of a video sent as images
_SCHEMES = ("http:", "https:", "data:", "s3:", "bos:", "file:")
_FRAMES = "data:video/jpeg;base64,"
_ESCAPED = (("%2B", "+"), ("%2b", "+"), ("%2F", "/"), ("%2f", "/"), ("%3D", "="), ("%3d", "="))


class MediaRequests:
    """Media of requests, for the handlers of one api process. `store` is None if the model takes only text. `kinds`: the media
    that it takes."""

    def __init__(
        self, context: ActorContext, store: MediaStore | None, kinds: Collection[str], num_links: int = MAX_LINKS
    ) -> None:
        self._kinds = kinds
        self._config = context.config
        self._name = context.name
        self._store = store
        self._fetcher = Fetcher(context.config, num_links)
        self._num_fetches = context.counter("media_fetches_total")
        self._num_failed = context.counter("media_fetches_failed_total")
        self._fetch_seconds = context.histogram("media_fetch_seconds")

    async def gather(
        self, parts: list[MediaPart], request: Request, options: MediaOptions, key: str, deadline_ns: int = 0
    ) -> MediaLease:
        """Return the items of a request's parts, in order, held until `release` is called. `request`: its client may disconnect
        meanwhile. `key`: its id in the run. `deadline_ns` (CLOCK_MONOTONIC, 0: none): when it stops waiting. Raises
        RequestError with the part's path as `param`, or ClientGone; then nothing is held."""
        config = self._config
        check_parts(parts, self._kinds, config.enable_mm_embeds, config.limit_mm_per_prompt)
        if self._store is None or not parts:
            return MediaLease()
        given = {name: getattr(options, name) for name in MediaOptions.__struct_fields__}
        settings = {name: value for name, value in given.items() if value}
        encoded = dump(settings, "mm_processor_kwargs") if settings else b""
        source = source_of(request, config)
        work = _Gathering(config, self._name, self._store.hold(key, deadline_ns), self._fetch, encoded, source)
        try:
            await unless_gone(work.gather(parts), request.receive)
        except BaseException:
            work.lease.release()
            raise
        return work.lease

    async def _fetch(self, part: MediaPart, max_bytes: int, source: object) -> bytearray:
        store = self._store
        assert store is not None
        begun_ns = time.monotonic_ns()
        self._num_fetches.add(1)
        num_bytes = 0

        def came(num_more: int) -> None:
            nonlocal num_bytes
            store.expect(num_more)
            num_bytes += num_more

        try:
            is_video = part.kind == "video"
            return await self._fetcher.fetch(part.content, max_bytes, is_video=is_video, came=came, source=source)
        except RequestError:
            self._num_failed.add(1)
            raise
        finally:
            store.expect(-num_bytes)
            self._fetch_seconds.observe((time.monotonic_ns() - begun_ns) / 1e9)


Fetch = Callable[[MediaPart, int, object], Awaitable[bytearray]]


class _Gathering:
    """Media of one request while they arrive."""

    def __init__(self, config: EngineConfig, name: str, lease: MediaLease, fetch: Fetch, settings: bytes, source: str) -> None:
        self.lease = lease
        self._config = config
        self._name = name
        self._fetch = fetch
        self._settings = settings
        self._source: object = source or self  # if unknown, each request is its own source
        self._overload = asyncio.get_running_loop().create_future()

    async def gather(self, parts: list[MediaPart]) -> None:
        """Gather all parts. Raises the RequestError of the first rejected part in order; if there is no room for one, or the
        time is over, no part is waited for."""
        work = asyncio.ensure_future(self._gather(parts))
        deadline_ns = self.lease.deadline_ns
        timeout_s = max(0, deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None
        try:
            await asyncio.wait({work, self._overload}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif self._overload.done():
                raise self._overload.result()
            else:
                raise RequestError(
                    (
                        "the request timed out before its images and video were fetched and checked; use a longer timeout, "
                        "or send fewer or smaller ones"
                    ),
                    status=408,
                    code="timeout",
                )
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _gather(self, parts: list[MediaPart]) -> None:
        """Gather the parts. Equal parts are one item, so that a link is fetched once."""
        distinct: dict[object, MediaPart] = {}
        for part in parts:
            distinct.setdefault(part.identity, part)
        found: list[MediaItem] = []
        results = download(list(distinct.values()), self._item, self._config.media_download_parallel)
        try:
            async for result in results:
                if isinstance(result, RequestError):
                    raise result
                found.append(result)
        finally:
            await results.aclose()
        items = dict(zip(distinct, found, strict=True))
        self.lease.items = [items[part.identity] for part in parts]

    async def _item(self, part: MediaPart) -> MediaItem:
        try:
            handles = await self._bytes(part)
            if not all(handle.num_bytes for handle in handles):
                code = (
                    "invalid_features" if part.is_features else "image_parse_error" if part.kind == "image" else "invalid_video"
                )
                raise RequestError("the file is empty", code=code)
            source = MediaSource(self._name, handles, part.kind, part.is_features, part.grid_thw, self._settings)
            return await self.lease.prepare(source)
        except RequestError as error:
            placed = RequestError(
                f"{part.path}: {error.message}",
                status=error.status,
                code=error.code,
                param=part.path,
                retry_after_s=error.retry_after_s,
            )
            if error.status != 400 and not self._overload.done():
                self._overload.set_result(placed)
            raise placed from None

    async def _bytes(self, part: MediaPart) -> tuple[SlabHandle, ...]:
        content = part.content
        max_bytes = self._config.max_media_bytes * (2 if part.kind == "video" or part.is_features else 1)
        if part.kind == "video" and not part.is_features and content[: len(_FRAMES)].lower() == _FRAMES:
            return await self._frames(content[len(_FRAMES) :], max_bytes)
        if content[:5].lower() == "data:":
            head, comma, payload = content.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise _no_base64("expected a data: link such as data:TYPE;base64,DATA")
            return (await self._decoded(payload, max_bytes),)
        if part.is_features and not content[:6].lower().startswith(_SCHEMES):
            return (await self._decoded(content, max_bytes),)
        fetched = await self._fetch(part, max_bytes, self._source)
        handle, memory = self.lease.allocate(len(fetched))
        memory[:] = fetched
        return (handle,)

    async def _frames(self, payload: str, max_bytes: int) -> tuple[SlabHandle, ...]:
        num_frames = payload.count(",") + 1
        if num_frames > MAX_FRAMES:
            raise RequestError(f"the video has {num_frames} frames, limit {MAX_FRAMES}; send fewer", code="invalid_video")
        if _num_decoded(payload) > max_bytes:
            raise too_large(_num_decoded(payload), max_bytes)
        return tuple([await self._decoded(frame, max_bytes) for frame in payload.split(",")])

    async def _decoded(self, text: str, max_bytes: int) -> SlabHandle:
        """Decode base64 into the slab, piece by piece."""
        if "%" in text:  # links escape three characters of base64; other escapes are rejected as invalid
            for escaped, sign in _ESCAPED:
                text = text.replace(escaped, sign)
        text = text.rstrip("=")
        num_bytes = _num_decoded(text)
        if num_bytes > max_bytes:
            raise too_large(num_bytes, max_bytes)
        if len(text) % 4 == 1:
            raise _no_base64(f"{len(text)} characters are not a valid base64 length")
        handle, memory = self.lease.allocate(num_bytes)
        await decode_base64(text, memory)
        return handle


async def decode_base64(text: str, memory: memoryview) -> None:
    """Decode base64 without padding into memory of the right size; the loop has a turn after each piece. Raises RequestError if
    it is invalid."""
    place = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        try:
            decoded = binascii.a2b_base64(piece + "=" * (-len(piece) % 4))
        except (binascii.Error, ValueError) as error:
            raise _no_base64(str(error)) from None
        if len(decoded) != _num_decoded(piece):  # characters outside the base64 alphabet are skipped
            raise _no_base64("contains characters that are not base64")
        memory[place : place + len(decoded)] = decoded
        place += len(decoded)
        await asyncio.sleep(0)


def _num_decoded(text: str) -> int:
    return len(text) * 3 // 4


def _no_base64(why: str) -> RequestError:
    return RequestError(f"invalid base64: {why}", code="invalid_base64_image")

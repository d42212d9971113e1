"""Pixels requested from the media processes: which are requested, which are ready, and their release.

Used by the scheduler process alone. A unit's pixels are requested from the media process that inspected the request's files,
because it may still have them, or from another if that one is not ready. They stay there until `give_back`. If a media process
dies, its pixels are requested again, perhaps from another.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from engine.messages import Pixels, PixelsDone, PixelsFailed, WantPixels
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, earliest
from engine.process.topology import MEDIA, actors_of, media_of
from engine.scheduler.sequence_media import PromptUnit

MAX_TRIES = 6  # tries that find no room for pixels, or no bytes, while no others are held
RETRY_NS = 20_000_000  # before the second try, then doubled each time
UNAVAILABLE = 503


class PixelRequest(msgspec.Struct):
    """Pixels of a unit, requested or ready."""

    unit_hash: bytes
    call_id: str
    media: str
    media_epoch: int
    pixels: Pixels | None = None


class _Retry(msgspec.Struct):
    num_tries: int
    at_ns: int


class PixelRequests:
    """Requested pixels by unit."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._names = actors_of(MEDIA, context.peers())
        self._outboxes = {name: BackloggedOutbox(context.outbox(name).send_bytes) for name in self._names}
        self._requests: dict[bytes, PixelRequest] = {}
        self._by_call: dict[str, PixelRequest] = {}
        self._retries: dict[bytes, _Retry] = {}
        self._num_calls = 0
        self._next_ns = 0  # when to request what was not requested last time; 0: everything was

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def deadline_ns(self) -> int:
        """Return the time of the next try; 0: nothing waits."""
        return earliest(self._next_ns, *(outbox.deadline_ns() for outbox in self._outboxes.values()))

    def keep(self, wanted: Collection[bytes]) -> None:
        """Release pixels, and cancel requests for them, that are no longer wanted."""
        for unit_hash in [unit_hash for unit_hash in self._requests if unit_hash not in wanted]:
            self.give_back(self.take(unit_hash))
        for unit_hash in [unit_hash for unit_hash in self._retries if unit_hash not in wanted]:
            del self._retries[unit_hash]
        self._next_ns = 0

    def want(self, unit: PromptUnit, group_id: str, now_ns: int) -> None:
        """Request the pixels for a request, unless they are requested already or must wait."""
        if unit.unit_hash in self._requests:
            return
        retry = self._retries.get(unit.unit_hash)
        if retry is not None and retry.at_ns > now_ns:
            self._next_ns = earliest(self._next_ns, retry.at_ns)
            return
        ready = [name for name in self._names if self._context.is_peer_ready(name)]
        if not ready:
            self._next_ns = earliest(self._next_ns, now_ns + RETRY_NS)
            return
        media = media_of(group_id, self._names)
        if media not in ready:
            media = media_of(group_id, ready)
        self._num_calls += 1
        context = self._context
        call_id = f"{context.name}.{context.epoch}.{self._num_calls}"
        request = PixelRequest(unit.unit_hash, call_id, media, context.peer_epoch(media))
        self._requests[unit.unit_hash] = self._by_call[call_id] = request
        self._outboxes[media].post(WantPixels(call_id, context.name, context.epoch, unit.item, unit.index, group_id))

    def ready(self, unit_hash: bytes) -> Pixels | None:
        request = self._requests.get(unit_hash)
        return None if request is None else request.pixels

    def make_way(self, unit_hash: bytes) -> None:
        """Release ready pixels if others are still waited for, perhaps for lack of room."""
        waiting = self._requests.get(unit_hash)
        if waiting is None or waiting.pixels is not None:
            return
        for request in list(self._requests.values()):
            if request.media == waiting.media and request.pixels is not None:
                self.give_back(self.take(request.unit_hash))

    def take(self, unit_hash: bytes) -> PixelRequest:
        """Take ready pixels; the caller gives them back."""
        request = self._requests.pop(unit_hash)
        del self._by_call[request.call_id]
        return request

    def give_back(self, request: PixelRequest) -> None:
        """Release the pixels of a request that is no longer read or awaited: there may be room for others now."""
        for retry in self._retries.values():
            retry.at_ns = 0
        if request.media_epoch == self._context.peer_epoch(request.media):
            self._outboxes[request.media].post(PixelsDone(request.call_id))

    def came(self, pixels: Pixels) -> None:
        request = self._by_call.get(pixels.call_id)
        if request is None:  # a restarted media process found an old request in its ring
            self._outboxes[pixels.media].post(PixelsDone(pixels.call_id))
            return
        request.pixels = pixels
        self._retries.pop(request.unit_hash, None)

    def failed(self, failed: PixelsFailed, num_lent: int, now_ns: int) -> bytes:
        """Return the unit if its pixels cannot be decoded; empty: they are requested again. While other pixels are held,
        `num_lent` of them in use, a lack of room is no failure."""
        request = self._by_call.get(failed.call_id)
        if request is None:
            return b""
        unit_hash = self.take(request.unit_hash).unit_hash
        retry = self._retries.get(unit_hash, _Retry(0, 0))
        is_alone = not self._requests and not num_lent
        num_tries = retry.num_tries + is_alone
        if failed.status != UNAVAILABLE or num_tries >= MAX_TRIES:
            self._retries.pop(unit_hash, None)
            return unit_hash
        self._retries[unit_hash] = _Retry(num_tries, now_ns + (RETRY_NS << num_tries))
        return b""

    def media_restarted(self, name: str, epoch: int) -> None:
        """Forget the pixels of the media process's previous life."""
        for request in list(self._requests.values()):
            if request.media == name and request.media_epoch < epoch:
                self.take(request.unit_hash)

    def flush(self) -> int:
        """Send as much as fits; return the number of messages sent."""
        return sum(outbox.flush() for outbox in self._outboxes.values())

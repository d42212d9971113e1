"""The media process: inspects files that clients sent, and decodes the pixels of those that will be encoded.

Runs as `media0..`, for vision models only:

    api         Prepare                ->  media  ->  Prepared                 api
    scheduler   WantPixels, PixelsDone ->  media  ->  Pixels, PixelsFailed     scheduler

It holds nothing that cannot be recreated: files are in the api's media slab, and pixels, which it decodes on request, are in
its own slab until the scheduler releases them. Requests take turns, a file or a unit at a time, by the pixels that were decoded
for each (`FairQueue`). The next request is the one with the fewest pixels after a turn as large as its last. So a new request
waits only for the work in progress, and no request has a second large file decoded before the others had as much. Before a file
is decoded it is noted in shared memory: if it ends this process twice, the next life refuses it.
"""

from __future__ import annotations

import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engine.checkpoint.record import ModelRecord
from engine.errors import RequestError, SharedMemoryError
from engine.media.identity import unit_hash
from engine.media.items import MediaItems, Parts
from engine.media.refusal import LIMIT_DEATHS, parse_error, refuse
from engine.media.settings import MediaSettings
from engine.messages import (
    MediaItem,
    MediaSource,
    Message,
    Pixels,
    PixelsDone,
    PixelsFailed,
    Prepare,
    Prepared,
    WantPixels,
    encode,
)
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.fair_queue import FairQueue
from engine.process.outbox import BackloggedOutbox, earliest
from engine.process.topology import LINK, actors_of
from shm.death_notes import DeathNotes
from shm.extent_slab import ExtentSlab
from shm.slab import SlabHandle

MAX_WAITING = 4096  # waiting units; a scheduler requests a few
MAX_CALL_BYTES = 1024  # of a WantPixels besides the item
TURN_PIXELS = 1 << 16  # cost of a turn in addition to decoding: reading the bytes, hashing, resizing
MAX_CPU_S = 30.0  # of a turn, estimated to take 2 s: the last resort, measured in CPU time
MAX_SILENT_CPU_S = 20.0  # between two checks of clock and request: an image or a packet; if that takes longer, the process ends
_COPIES = 4  # of an image's pixels in memory at once, 4 bytes each: decoded, rotated, with transparency, on white
_WORKING_BYTES = 1 << 30  # additional address space: libraries that are loaded late, video, stacks


Key = tuple[str, str]  # peer and call id


class MediaActor(Actor):
    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._notes = DeathNotes.attach(context.run.run_id, context.name)
        self._slab = context.own_slab()
        self._files: dict[str, ExtentSlab] = {}  # media slabs by api, and the link's
        self._outboxes: dict[str, BackloggedOutbox] = {}
        # of the peers' lives that this process works for
        self._epochs = {name: context.peer_epoch(name) for name in context.peers()}
        self._waiting: dict[Key, Prepare | WantPixels] = {}
        self._turns: FairQueue[str, Key] = FairQueue()  # waiting work by request; costs are in pixels
        self._wanted: Counter[bytes] = Counter()  # waiting units, by the first unit of their item
        self._held: dict[Key, SlabHandle] = {}  # pixels that were sent
        self._is_full = False  # the next wanted unit waits for room
        self._hands: Prepare | WantPixels | None = None  # current work of this turn
        self._hands_cpu_s = 0.0  # CPU time of this process when the work began
        self._num_good = context.counter("media_items_total", outcome="good")
        self._num_refused = context.counter("media_items_total", outcome="refused")
        self._num_units = context.counter("media_units_total")
        self._num_bytes = context.counter("media_bytes_total")
        self._num_dropped = context.counter("messages_dropped_total")
        self._num_waiting = context.counter("units_waiting")
        self._num_used_bytes = context.counter("pixel_slab_used_bytes")
        self._prepare_s = context.histogram("media_prepare_seconds")
        self._decode_s = context.histogram("media_decode_seconds")

    def on_start(self) -> None:
        config = self.context.config
        record = ModelRecord.of_run(self.context.run.model_path)
        assert record.config.vision is not None, "a text model has no media process"
        self._items = MediaItems(
            record.config.vision,
            MediaSettings.of(record, config.mm_processor_kwargs, config.media_io_kwargs),
            record.files,
            config.max_image_pixels,
            config.encoder_cache_size,
            self._slab.capacity_bytes,
            self._check_wanted,
        )
        self._num_used_bytes.set(self._slab.num_used_bytes)
        has_link = config.has_link and not config.is_router
        for holder in (*actors_of("api", self.context.peers()), *((LINK,) if has_link else ())):
            self._files[holder] = self.context.media_slab(holder)
        limit_memory(4 * _COPIES * config.max_image_pixels + _WORKING_BYTES)

    # ------------------------------------------------------------------------------------------------------ messages

    def on_message(self, sender: str, message: Message) -> None:
        match message:
            case Prepare(call_id, _, epoch):
                if self._meets(sender, epoch):
                    self._add((sender, call_id), message)
            case WantPixels(call_id, _, epoch):
                if not self._meets(sender, epoch):
                    return
                if self._wanted.total() < MAX_WAITING:
                    self._add((sender, call_id), message)
                else:
                    text = f"the decoding queue is full: {MAX_WAITING} media units are waiting, the limit; try again later"
                    self._outbox(sender).post(PixelsFailed(call_id, 503, text))
            case PixelsDone(call_id):
                self._release((sender, call_id))
            case _:
                raise AssertionError(f"unexpected {type(message).__name__} from {sender}")

    def on_peer(self, name: str, epoch: int) -> None:
        self._meets(name, epoch)

    def _meets(self, name: str, epoch: int) -> bool:
        """Return whether the request is for the current lives of both sides. Requests for another life are not awaited; a
        restarted peer may first be noticed by its message."""
        known = self._epochs.get(name, 0)
        if epoch > known:
            self._epochs[name] = epoch
            if name in self._outboxes:
                self._outboxes[name].clear()
            for key in [*self._waiting, *self._held]:
                if key[0] == name:
                    self._release(key)
                    self._num_dropped.add(1)
        return epoch >= known

    def _add(self, key: Key, work: Prepare | WantPixels) -> None:
        """Put work at the end of its request's line, only once even if it is requested again."""
        if key in self._waiting:
            return
        self._waiting[key] = work
        self._turns.push(work.request, key)
        if isinstance(work, WantPixels):
            self._wanted[work.item.unit_hashes[0]] += 1

    def _release(self, key: Key) -> None:
        """Drop work that is no longer wanted, waiting or sent."""
        self._end(key)
        handle = self._held.pop(key, None)
        if handle is not None:
            self._slab.release(handle)
        self._is_full = False

    def _end(self, key: Key) -> None:
        """Remove work from the queue."""
        work = self._waiting.pop(key, None)
        if work is None:
            return
        self._turns.remove(work.request, key)
        if isinstance(work, WantPixels):
            first = work.item.unit_hashes[0]
            self._wanted[first] -= 1
            if not self._wanted[first]:
                del self._wanted[first]

    # ------------------------------------------------------------------------------------------------------ the loop

    def do_work(self) -> int:
        """Work on one file, one unit, or one turn's part of a unit."""
        num_done = 0
        key = next((key for key in self._turns if self._can_go(self._waiting[key])), None)
        if key is not None:
            work = self._waiting[key]
            self._hands, self._hands_cpu_s = work, time.process_time()
            limit_silence(MAX_SILENT_CPU_S)
            num_before = self._items.num_pixels
            is_done = self._prepare(work) if isinstance(work, Prepare) else self._make_pixels(key, work)
            num_pixels = self._items.num_pixels - num_before
            num_done = int(is_done or num_pixels > 0)
            if num_done:
                cost = TURN_PIXELS + num_pixels
                self._turns.charge(work.request, cost, next_cost=cost)
                self._turns.advance(cost)
            if is_done:
                self._end(key)
            self._hands = None
            limit_silence(0)
            self.context.row.beat(time.monotonic_ns())
        self._num_waiting.set(self._wanted.total())
        self._num_used_bytes.set(self._slab.num_used_bytes)
        return num_done + sum(outbox.flush() for outbox in self._outboxes.values())

    def _can_go(self, work: Prepare | WantPixels) -> bool:
        """Return whether work can start now: pixels need room in the slab, and a video must be open, but only a few may be."""
        if isinstance(work, Prepare):
            return True
        return not self._is_full and self._items.can_open(work.item, self._wanted)

    def deadline_ns(self) -> int:
        return earliest(*(outbox.deadline_ns() for outbox in self._outboxes.values()))

    def on_stop(self) -> None:
        self._items.close()
        self._notes.close()
        for slab in (self._slab, *self._files.values()):
            slab.close()

    # ------------------------------------------------------------------------------------------------------ the work

    def _prepare(self, prepare: Prepare) -> bool:
        start_ns = time.monotonic_ns()
        source = prepare.source
        answer: Prepared | None
        try:
            self._check_wanted()
            parts = self._read(source)
            settings = self._items.settings_of(source)
            name = self._items.name_of(source, parts, settings)
            with self._noted(unit_hash(name, 0), source.kind):
                item = self._items.look(source, parts, settings, name, self._wanted)
            self._check_size(item)
            answer = Prepared(prepare.call_id, item)
            self._num_good.add(1)
        except SharedMemoryError:  # the api process released it: the client disconnected, or the process died
            self._num_dropped.add(1)
            return True
        except RequestError as error:
            answer = Prepared(prepare.call_id, None, error.status, error.message, error.code)
            self._num_refused.add(1)
        self._prepare_s.observe((time.monotonic_ns() - start_ns) / 1e9)  # before the answer is sent
        self._outbox(prepare.api).post(answer)
        return True

    def _check_wanted(self) -> None:
        """Check between two packets of a video. Raises SharedMemoryError if the work is no longer wanted, and RequestError if
        it took far more CPU time than estimated."""
        now_ns = time.monotonic_ns()
        self.context.row.beat(now_ns)
        limit_silence(MAX_SILENT_CPU_S)
        work = self._hands
        assert work is not None
        if isinstance(work, Prepare):
            source, deadline_ns = work.source, work.deadline_ns
        else:
            source, deadline_ns = work.item.source, 0
        if 0 < deadline_ns < now_ns:
            raise SharedMemoryError("the request timed out")
        if source.parts:
            self._files[source.api].check(source.parts[0])
        seconds = time.process_time() - self._hands_cpu_s
        if seconds > MAX_CPU_S:
            raise refuse(
                f"a part of the video took {seconds:.0f} s of CPU time, the limit is {MAX_CPU_S:.0f}; re-encode the video",
                "invalid_video",
            )

    def _check_size(self, item: MediaItem) -> None:
        """Raise RequestError if the facts of a video do not fit into a record, which repeats them for each requested unit."""
        if len(item.unit_hashes) > 1:
            num_bytes, limit = len(encode(Prepared("", item))), self.context.mailbox.max_record_bytes - MAX_CALL_BYTES
            if num_bytes > limit:
                raise refuse(
                    f"the video has {len(item.unit_hashes)} units with {num_bytes} bytes of hashes and times, the limit is "
                    f"{limit}; request fewer frames",
                    "invalid_video",
                )

    def _make_pixels(self, key: Key, wanted: WantPixels) -> bool:
        """Decode the pixels of a unit. Return False if it needs another turn, or if there is no room: then it waits until
        pixels are released, and no other pixels go first."""
        start_ns = time.monotonic_ns()
        handle = self._slab.allocate(self._items.unit_bytes(wanted.item))
        if handle is None:
            self._is_full = True
            return False
        answer = self._answer_to(wanted, handle)
        if isinstance(answer, Pixels):
            self._held[key] = handle
            self._num_units.add(1)
        else:
            self._slab.release(handle)
        self._decode_s.observe((time.monotonic_ns() - start_ns) / 1e9)  # before the answer is sent
        if answer is not None:
            self._outbox(key[0]).post(answer)
        return answer is not None

    def _answer_to(self, wanted: WantPixels, handle: SlabHandle) -> Pixels | PixelsFailed | None:
        """Return the answer, with the unit's pixels in the slab if possible. None: not yet."""
        item = wanted.item
        try:
            parts = [] if self._items.has_open(item) else self._read(item.source)
            with self._noted(item.unit_hashes[0], item.kind):
                pixels = self._items.pixels(item, wanted.index, parts)
        except SharedMemoryError:
            text = f"the file is no longer in the memory of {item.source.api}, which released it or died; try again"
            return PixelsFailed(wanted.call_id, 503, text)
        except RequestError as error:
            return PixelsFailed(wanted.call_id, error.status, error.message, error.code)
        if pixels is None:
            return None
        self._slab.writable(handle)[:] = np.ascontiguousarray(pixels).data.cast("B")
        return Pixels(wanted.call_id, self.context.name, handle)

    def _read(self, source: MediaSource) -> Parts:
        """Return the bytes of an item. Raises SharedMemoryError if they are gone."""
        slab = self._files[source.api]
        parts = [slab.read(handle) for handle in source.parts]
        self._num_bytes.add(sum(map(len, parts)))
        return parts

    @contextmanager
    def _noted(self, name: bytes, kind: str) -> Iterator[None]:
        """Note the file while it is decoded. Raises RequestError if it has killed this process too often."""
        num_deaths = self._notes.num_deaths(name)
        if num_deaths >= LIMIT_DEATHS:
            raise parse_error(kind, f"the decoder process died {num_deaths} times on this file")
        self._notes.open(name)
        try:
            yield
        finally:
            self._notes.close_note()
        if num_deaths:
            self._notes.forget(name)

    def _outbox(self, receiver: str) -> BackloggedOutbox:
        if receiver not in self._outboxes:
            self._outboxes[receiver] = BackloggedOutbox(self.context.outbox(receiver).send_bytes)
        return self._outboxes[receiver]


def limit_silence(seconds: float) -> None:
    """End this process (SIGPROF) after this much CPU time from now on, even in a decoder that never returns; its file is noted,
    and rejected after a second death. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(num_bytes: int) -> None:
    """Limit further address space of this process; allocations beyond that raise MemoryError."""
    with open("/proc/self/statm", "rb") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

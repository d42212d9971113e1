"""The media process: looks at files that clients sent, and makes pixels of those that are to be encoded.

Runs as `media0..`, of vision models alone:

    api         Prepare                ->  media  ->  Prepared                 api
    scheduler   WantPixels, PixelsDone ->  media  ->  Pixels, PixelsFailed     scheduler

It holds nothing that cannot be made again: files lie in the api's media slab, and pixels, which it makes when they are asked
for, in its own slab until the scheduler lets go of them. What is asked for is done in order, a file and a unit a turn. Before
a file is looked at it is noted in shared memory: where it ends this process twice, it is refused by the next life.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engine.checkpoint.record import ModelRecord
from engine.errors import RequestError, SharedMemoryError
from engine.media.identity import unit_hash
from engine.media.items import MediaItems, Parts
from engine.media.refusal import LIMIT_DEATHS, parse_error
from engine.media.settings import MediaSettings
from engine.messages import (
    MediaSource,
    Message,
    Pixels,
    PixelsDone,
    PixelsFailed,
    Prepare,
    Prepared,
    WantPixels,
)
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, earliest
from engine.process.topology import SCHEDULER, actors_of, role_of
from shm.death_notes import DeathNotes
from shm.extent_slab import ExtentSlab
from shm.slab import SlabHandle

MAX_WAITING = 4096  # units that are asked for; a scheduler asks for a few
_COPIES = 4  # of a picture's pixels in memory at once, 4 bytes each: decoded, turned, with transparency, on white
_WORKING_BYTES = 1 << 30  # of address space besides: libraries that are loaded late, video, stacks


class MediaActor(Actor):
    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self._notes = DeathNotes.attach(context.run.run_id, context.name)
        self._slab = context.own_slab()
        self._files: dict[str, ExtentSlab] = {}  # media slabs by api
        self._outboxes: dict[str, BackloggedOutbox] = {}
        self._prepares: deque[Prepare] = deque()
        self._wanted: dict[tuple[str, str], WantPixels] = {}  # in order, by scheduler and call id
        self._held: dict[tuple[str, str], SlabHandle] = {}  # the same, of pixels that were sent
        self._is_full = False  # the next that is wanted waits for room
        self._was_video = False  # the last unit was of one
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
        assert record.config.vision is not None, "a model of text has no media process"
        self._items = MediaItems(
            record.config.vision,
            MediaSettings.of(record, config.mm_processor_kwargs, config.media_io_kwargs),
            record.files,
            config.max_image_pixels,
            config.encoder_cache_size,
            self._slab.capacity_bytes,
            lambda: self.context.row.beat(time.monotonic_ns()),
        )
        self._num_used_bytes.set(self._slab.num_used_bytes)
        for api in actors_of("api", self.context.peers()):
            self._files[api] = self.context.media_slab(api)
        limit_memory(4 * _COPIES * config.max_image_pixels + _WORKING_BYTES)

    # ------------------------------------------------------------------------------------------------------ messages

    def on_message(self, sender: str, message: Message) -> None:
        match message:
            case Prepare():
                self._prepares.append(message)
            case WantPixels(call_id):
                if len(self._wanted) < MAX_WAITING:
                    self._wanted[sender, call_id] = message
                else:
                    text = f"{MAX_WAITING} units wait for their pixels already; try again"
                    self._outbox(sender).post(PixelsFailed(call_id, 503, text))
            case PixelsDone(call_id):
                self._let_go(sender, call_id)
            case _:
                raise AssertionError(f"{type(message).__name__} from {sender} is not for a media process")

    def on_peer(self, name: str, epoch: int) -> None:
        """Nobody waits for what another life asked for."""
        if name in self._outboxes:
            self._outboxes[name].clear()
        if role_of(name) == "api":
            self._drop([prepare for prepare in self._prepares if prepare.api == name and prepare.api_epoch < epoch])
        elif role_of(name) == SCHEDULER:
            stale = [key for key, wanted in self._wanted.items() if key[0] == name and wanted.scheduler_epoch < epoch]
            for key in [*stale, *(key for key in self._held if key[0] == name)]:
                self._let_go(*key)

    def _drop(self, prepares: list[Prepare]) -> None:
        for prepare in prepares:
            self._prepares.remove(prepare)
        self._num_dropped.add(len(prepares))

    def _let_go(self, scheduler: str, call_id: str) -> None:
        self._wanted.pop((scheduler, call_id), None)
        handle = self._held.pop((scheduler, call_id), None)
        if handle is not None:
            self._slab.release(handle)
            self._is_full = False

    # ------------------------------------------------------------------------------------------------------ the loop

    def step(self) -> int:
        """One file and one unit."""
        num_done = 0
        if self._prepares:
            self._prepare(self._prepares.popleft())
            self.context.row.beat(time.monotonic_ns())
            num_done += 1
        if self._wanted and not self._is_full:
            num_done += self._make_pixels()
        self._num_waiting.set(len(self._wanted))
        self._num_used_bytes.set(self._slab.num_used_bytes)
        return num_done + sum(outbox.flush() for outbox in self._outboxes.values())

    def deadline_ns(self) -> int:
        return earliest(*(outbox.deadline_ns() for outbox in self._outboxes.values()))

    def on_stop(self) -> None:
        self._items.close()
        self._notes.close()
        for slab in (self._slab, *self._files.values()):
            slab.close()

    # ------------------------------------------------------------------------------------------------------ the work

    def _prepare(self, prepare: Prepare) -> None:
        start_ns = time.monotonic_ns()
        source = prepare.source
        try:
            parts = self._read(source)
        except SharedMemoryError:  # the api that asked has let go of it: the client left, or it died
            self._num_dropped.add(1)
            return
        try:
            settings = self._items.settings_of(source)
            name = self._items.name_of(source, parts, settings)
            with self._noted(unit_hash(name, 0), source.kind):
                item = self._items.look(source, parts, settings, name)
        except RequestError as error:
            self._num_refused.add(1)
            self._outbox(prepare.api).post(Prepared(prepare.call_id, None, error.status, error.message, error.code))
        else:
            self._num_good.add(1)
            self._outbox(prepare.api).post(Prepared(prepare.call_id, item))
        self._prepare_s.observe((time.monotonic_ns() - start_ns) / 1e9)

    def _make_pixels(self) -> int:
        """Of the next unit that is wanted. 0: there is no room, so it waits until pixels are let go of."""
        start_ns = time.monotonic_ns()
        key, wanted = self._next_wanted()
        handle = self._slab.allocate(self._items.unit_bytes(wanted.item))
        if handle is None:
            self._is_full = True
            return 0
        answer = self._answer_to(wanted, handle)
        if isinstance(answer, Pixels):
            self._held[key] = handle
            self._num_units.add(1)
        else:
            self._slab.release(handle)
        del self._wanted[key]
        self._was_video = wanted.item.kind == "video"
        self._outbox(key[0]).post(answer)
        self._decode_s.observe((time.monotonic_ns() - start_ns) / 1e9)
        return 1

    def _next_wanted(self) -> tuple[tuple[str, str], WantPixels]:
        """The first; between two units of video the first picture, which would else wait for hundreds of them."""
        queue = self._wanted.items()
        first = next(iter(queue))
        return next((entry for entry in queue if entry[1].item.kind == "image"), first) if self._was_video else first

    def _answer_to(self, wanted: WantPixels, handle: SlabHandle) -> Pixels | PixelsFailed:
        """With the unit's pixels in the slab, where they can be made."""
        item = wanted.item
        try:
            parts = [] if self._items.has_open(item) else self._read(item.source)
            with self._noted(item.unit_hashes[0], item.kind):
                pixels = self._items.pixels(item, wanted.index, parts)
        except SharedMemoryError:
            text = f"the file is not in the memory of {item.source.api} any more, which let go of it or died; try again"
            return PixelsFailed(wanted.call_id, 503, text)
        except RequestError as error:
            return PixelsFailed(wanted.call_id, error.status, error.message, error.code)
        self._slab.writable(handle)[:] = np.ascontiguousarray(pixels).data.cast("B")
        return Pixels(wanted.call_id, self.context.name, handle)

    def _read(self, source: MediaSource) -> Parts:
        """The bytes of an item. SharedMemoryError: they are not there any more."""
        slab = self._files[source.api]
        parts = [slab.read(handle) for handle in source.parts]
        self._num_bytes.add(sum(map(len, parts)))
        return parts

    @contextmanager
    def _noted(self, name: bytes, kind: str) -> Iterator[None]:
        """While a file is in hands. RequestError: it has ended this process too often."""
        num_deaths = self._notes.num_deaths(name)
        if num_deaths >= LIMIT_DEATHS:
            raise parse_error(kind, f"the process that decodes files ended {num_deaths} times over this one")
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


def limit_memory(num_bytes: int) -> None:
    """Let this process take at most so much more address space; what asks for more fails by itself, with MemoryError."""
    with open("/proc/self/statm", "rb") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

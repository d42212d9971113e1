"""The media process on real rings and slabs: facts of files, pixels on request, and deaths of all processes around it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from engine.media.actor import MAX_WAITING, MediaActor
from engine.media.identity import unit_hash
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
    decode,
    encode,
)
from engine.process.actor import ActorLoop
from engine.process.context import ActorContext
from engine.process.run_directory import Run
from engine.process.segments import MediaMemory, RunSegments, unlink_segments
from engine.process.topology import RingSizes
from shm.death_notes import DeathNotes
from shm.errors import SharedMemoryError
from shm.mailbox import Mailbox, MailboxSender
from tests.engine.media.visions import PIXELS, VISION, record_of
from tests.engine.scheduler.simulation import small_config
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S

NAMES = ("api0", "media0", "scheduler")
PLAIN = (VISION / "plain.png").read_bytes()
SETTINGS = json.dumps({"mm_processor_kwargs": {"max_pixels": 50176}}).encode()


class Bench:
    """The actor, and the ends of its peers."""

    def __init__(self, directory: Path) -> None:
        self.config = small_config(
            directory,
            media_processes=1,
            media_memory=1 << 22,
            mm_processor_cache_gb=1 / 1024,
            encoder_cache_size=4096,
            encoder_row_width=64,
        )
        run_id = self.config.run_id
        self.run = Run(run_id, directory)
        self.run.write(self.run.model_path, record_of("qwen2_5_vl").encode())
        sizes = RingSizes(dict.fromkeys(NAMES, 1 << 16), 1 << 16)
        self.segments = RunSegments(run_id, NAMES, sizes, 0, media=MediaMemory.of(self.config))
        self.inboxes = {name: Mailbox.attach(run_id, name, 1) for name in ("api0", "scheduler")}
        self.senders = {name: MailboxSender.attach(run_id, "media0", name, 1) for name in ("api0", "scheduler")}
        self.api = self.context_of("api0")
        self.files = self.api.own_slab()
        self.epoch = 0
        self.start()

    def context_of(self, name: str, epoch: int = 1) -> ActorContext:
        passed = {source: memory.fd for source, memory in self.segments.media_memory_of(name).items()}
        return ActorContext(self.run, self.config, name, epoch, media_fds=passed)

    def start(self) -> None:
        self.epoch += 1
        self.context = self.context_of("media0", self.epoch)
        self.actor = MediaActor(self.context)
        self.actor.on_start()
        self.loop = ActorLoop(self.actor)

    def stop(self) -> None:
        self.actor.on_stop()
        self.context.close()

    def close(self) -> None:
        self.stop()
        self.api.close()
        for ring in (*self.inboxes.values(), *self.senders.values()):
            ring.close()
        self.segments.close()
        unlink_segments(self.config.run_id)

    def tell(self, sender: str, *messages: Message) -> None:
        for message in messages:
            assert self.senders[sender].try_send(encode(message))

    def settle(self) -> None:
        while self.loop.turn():
            pass

    def heard(self, name: str) -> list[Message]:
        self.settle()
        return [decode(payload) for _, payload in self.inboxes[name].receive(100)]

    def source(self, *parts: bytes, kind: str = "image", settings: bytes = SETTINGS) -> MediaSource:
        handles = [self.files.put(part) for part in parts]
        return MediaSource("api0", tuple(handle for handle in handles if handle), kind, settings=settings)

    def prepared(self, source: MediaSource, request: str = "r") -> Prepared:
        self.tell("api0", Prepare("p", "api0", 1, source, request))
        (answer,) = self.heard("api0")
        assert isinstance(answer, Prepared)
        return answer

    def item(self, *parts: bytes, kind: str = "image", settings: bytes = SETTINGS, request: str = "r") -> MediaItem:
        answer = self.prepared(self.source(*parts, kind=kind, settings=settings), request)
        assert answer.item is not None, answer.message
        return answer.item

    def wanted(self, call_id: str, item: MediaItem, index: int = 0, request: str = "r", epoch: int = 1) -> None:
        self.tell("scheduler", WantPixels(call_id, "scheduler", epoch, item, index, request))


def blank(width: int, height: int, colour: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    limits: list[int] = []
    monkeypatch.setattr("engine.media.actor.limit_memory", limits.append)  # of the tests' own process
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        yield bench
        bench.close()
        least = 4 * 4 * bench.config.max_image_pixels  # decoded, turned, with transparency and on white
        assert len(limits) == bench.epoch, "each life begins with a limit"
        assert all(least < limit < least + (2 << 30) for limit in limits)


def test_picture_is_inspected_and_its_pixels_sent(bench: Bench) -> None:
    item = bench.item((VISION / "large.jpg").read_bytes())
    expected = PIXELS["qwen2_5_vl"]["files"]["large.jpg"]
    assert item.grid_thw == (1, expected["height"] // 14, expected["width"] // 14)
    assert item.tokens_per_unit == item.grid_thw[1] * item.grid_thw[2] // 4
    assert (len(item.unit_hashes), item.timestamps, item.kind) == (1, (), "image")
    bench.wanted("a", item)
    (pixels,) = bench.heard("scheduler")
    assert isinstance(pixels, Pixels)
    assert (pixels.call_id, pixels.media) == ("a", "media0")
    made = np.frombuffer(bench.context_of("media0").pixel_slab("media0").read(pixels.handle), np.uint8)
    assert made.size == expected["height"] * expected["width"] * 3
    bench.wanted("b", item)  # once more, when nothing of it is at hand
    (again,) = bench.heard("scheduler")
    assert isinstance(again, Pixels)
    assert np.array_equal(np.frombuffer(bench.context_of("media0").pixel_slab("media0").read(again.handle), np.uint8), made)
    bench.tell("scheduler", PixelsDone("a"), PixelsDone("b"))
    bench.settle()
    assert bench.context.counter("pixel_slab_used_bytes").value == 0
    assert bench.context.counter("media_units_total").value == 2
    assert not bench.segments.blame_file("media0"), "no file is in hands"


def test_hash_covers_every_byte_and_setting(bench: Bench) -> None:
    names = [
        bench.item(PLAIN).unit_hashes,
        bench.item((VISION / "plain.bmp").read_bytes()).unit_hashes,  # the same samples
        bench.item(PLAIN, settings=b"").unit_hashes,
        bench.item(PLAIN + b"\0").unit_hashes,
        bench.item(PLAIN, PLAIN, kind="video").unit_hashes,
    ]
    assert len({unit for units in names for unit in units}) == len(names)
    assert bench.item(PLAIN).unit_hashes == names[0]
    assert bench.item(PLAIN, settings=b'{"mm_processor_kwargs":{"size":{"longest_edge":50176}}}').unit_hashes == names[0]


def test_invalid_files_are_answered_with_errors(bench: Bench) -> None:
    answer = bench.prepared(bench.source(b"%PDF-1.7 no picture"))
    assert (answer.item, answer.status, answer.code) == (None, 400, "unsupported_image_media_type")
    answer = bench.prepared(bench.source(PLAIN, settings=b'{"mm_processor_kwargs": {"max_pixels": 10000000}}'))
    assert (answer.status, answer.code) == (400, "invalid_value")
    large = (VISION / "large.jpg").read_bytes()
    answer = bench.prepared(bench.source(large[: len(large) // 2]))
    assert (answer.status, answer.code) == (400, "image_parse_error")
    assert bench.context.counter("media_items_total", outcome="refused").value == 3
    whole = bench.item(large)
    (handle,) = bench.source(large[: len(large) // 2]).parts
    source = msgspec.structs.replace(whole.source, parts=(handle,))
    bench.wanted("cut", msgspec.structs.replace(whole, source=source, unit_hashes=(b"c" * 32,)))
    bench.wanted("whole", whole)
    failed, pixels = bench.heard("scheduler")
    assert isinstance(failed, PixelsFailed)
    assert (failed.call_id, failed.status, failed.code) == ("cut", 400, "image_parse_error")
    assert isinstance(pixels, Pixels)


def test_a_file_that_its_owner_released(bench: Bench) -> None:
    source = bench.source(PLAIN)
    item = bench.item(PLAIN)
    for handle in (*source.parts, *item.source.parts):
        bench.files.release(handle)
    bench.tell("api0", Prepare("gone", "api0", 1, source, "r"))
    assert bench.heard("api0") == []
    bench.wanted("a", item)
    (failed,) = bench.heard("scheduler")
    assert isinstance(failed, PixelsFailed)
    assert failed.status == 503


def test_units_wait_in_order_for_room(bench: Bench) -> None:
    """The slab has 1 MiB, each of these takes 148176 bytes of it."""
    items = [bench.item((VISION / "large.jpg").read_bytes() + bytes([number])) for number in range(9)]
    for number, item in enumerate(items):
        bench.wanted(str(number), item)
    first = [message.call_id for message in bench.heard("scheduler") if isinstance(message, Pixels)]
    assert first == [str(number) for number in range(len(first))]
    assert 1 < len(first) < 9
    assert bench.context.counter("units_waiting").value == 9 - len(first)
    bench.tell("scheduler", PixelsDone(str(len(first))))  # it is not wanted any more
    bench.tell("scheduler", PixelsDone("0"))
    (message,) = bench.heard("scheduler")
    assert isinstance(message, Pixels)
    assert message.call_id == str(len(first) + 1)


def test_unwanted_pixels_release_their_room(bench: Bench) -> None:
    large = bench.item((VISION / "large.jpg").read_bytes(), settings=b"")
    for number in range(8):
        bench.wanted(f"large{number}", large, request="a")
    num_sent = len(bench.heard("scheduler"))
    assert num_sent < 8
    small = bench.item(PLAIN)
    bench.wanted("small", small, request="b")
    assert bench.heard("scheduler") == [], "it waits behind what waits for room, which would else never come"
    bench.tell("scheduler", *(PixelsDone(f"large{number}") for number in range(num_sent, 8)))
    assert [message.call_id for message in bench.heard("scheduler") if isinstance(message, Pixels)] == ["small"]


def test_requests_take_turns_by_decoded_pixels(bench: Bench) -> None:
    """One request's large pictures let another's small ones pass: each large one once, then all of these."""
    large = [bench.item(blank(2000, 1000, number)) for number in range(3)]
    small = [bench.item(blank(64, 48, 9 + number), request="small") for number in range(4)]
    for number, item in enumerate(large):
        bench.wanted(f"large{number}", item, request="large")
    for number, item in enumerate(small):
        bench.wanted(f"small{number}", item, request="small")
    made = [message.call_id for message in bench.heard("scheduler") if isinstance(message, Pixels)]
    assert made == ["large0", "small0", "small1", "small2", "small3", "large1", "large2"]


def test_new_requests_do_not_starve_a_large_picture(bench: Bench) -> None:
    large, small = bench.item(blank(400, 300, 1)), bench.item(blank(64, 48, 2))
    for number in range(2):
        bench.wanted(f"large{number}", large, request="large")
    made: list[str] = []
    for number in range(40):
        bench.wanted(f"new{number}", small, request=f"new{number}")  # there is always one more
        bench.loop.turn()
        made += [decode(payload).call_id for _, payload in bench.inboxes["scheduler"].receive(10)]
        bench.tell("scheduler", PixelsDone(made[-1]))
    assert made.index("large1") < 20


def test_picture_does_not_wait_for_a_video(bench: Bench) -> None:
    clip, picture = bench.item(*[PLAIN] * 8, kind="video"), bench.item(PLAIN, request="another")
    for index in range(4):
        bench.wanted(f"clip{index}", clip, index)
    bench.wanted("picture", picture, request="another")
    made = [message.call_id for message in bench.heard("scheduler") if isinstance(message, Pixels)]
    assert made.index("picture") <= 1
    assert [name for name in made if name != "picture"] == ["clip0", "clip1", "clip2", "clip3"]


def test_new_file_is_inspected_before_others_pixels(bench: Bench) -> None:
    items = [bench.item((VISION / "large.jpg").read_bytes() + bytes([number])) for number in range(3)]
    for number, item in enumerate(items):
        bench.wanted(str(number), item)
    bench.loop.turn()  # one is made
    bench.tell("api0", Prepare("new request", "api0", 1, bench.source(PLAIN), "new request"))
    bench.loop.turn()
    (answer,) = (decode(payload) for _, payload in bench.inboxes["api0"].receive(10))
    assert isinstance(answer, Prepared)
    assert bench.context.counter("units_waiting").value == 2
    assert len(bench.heard("scheduler")) == 3


def test_interleaved_videos_are_decoded_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most videos that may be open; another one waits, and its file is only inspected."""
    monkeypatch.setattr("engine.media.items.MAX_OPEN_CLIPS", 2)
    monkeypatch.setattr("engine.media.video.BYTE_PIXELS", 0)  # frames alone are counted
    data = (VISION / "clip.mp4").read_bytes()
    settings = json.dumps({"mm_processor_kwargs": {"num_frames": 8}}).encode()
    clips = [bench.item(data + bytes(number), kind="video", settings=settings, request=f"r{number}") for number in range(4)]
    num_units = len(clips[0].unit_hashes)
    assert num_units == 4
    for number, clip in enumerate(clips[:3]):
        for index in range(num_units):
            bench.wanted(f"{number}.{index}", clip, index, request=f"r{number}")
    before = bench.actor._items.num_pixels
    for _ in range(4):
        bench.loop.turn()
    item = bench.item(data + b"new", kind="video", settings=settings, request="new")  # takes no place of another
    made = [message.call_id for message in bench.heard("scheduler") if isinstance(message, Pixels)]
    assert sorted(made) == [f"{number}.{index}" for number in range(3) for index in range(num_units)]
    under_way = [{name[0] for name in made[:end]} & {name[0] for name in made[end:]} for end in range(len(made))]
    assert max(map(len, under_way)) == 2
    num_frames = (bench.actor._items.num_pixels - before) // (64 * 48)
    assert num_frames <= 3 * 25 + 1
    bench.wanted("new", item, request="new")
    assert len(bench.heard("scheduler")) == 1


def test_others_have_turns_during_a_long_unit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen frames of the video are far apart."""
    settings = json.dumps({"mm_processor_kwargs": {"num_frames": 2}}).encode()
    clip = bench.item((VISION / "clip.mp4").read_bytes(), kind="video", settings=settings)
    pictures = [bench.item(blank(10, 10, number), request=f"another{number}") for number in range(3)]
    monkeypatch.setattr("engine.media.items.MAX_TURN_PIXELS", 64 * 48)
    bench.wanted("clip", clip, request="clip")
    bench.loop.turn()
    assert bench.context.counter("units_waiting").value == 1, "it has had a turn and takes more"
    assert bench.context.counter("pixel_slab_used_bytes").value == 0
    for number, picture in enumerate(pictures):
        bench.wanted(f"picture{number}", picture, request=f"another{number}")
    made = [message.call_id for message in bench.heard("scheduler") if isinstance(message, Pixels)]
    assert made == ["picture0", "picture1", "picture2", "clip"]
    assert bench.context.counter("media_units_total").value == 4


class Packets:
    """Hook that calls `then` before packet `at` of the next decoded file, counted from 0."""

    def __init__(self, bench: Bench, at: int, then: Callable[[], object]) -> None:
        self.num_seen = 0
        beat = bench.actor._items._beat

        def seen() -> None:
            if self.num_seen == at:
                then()
            self.num_seen += 1
            beat()

        bench.actor._items._beat = seen


CLIP = (VISION / "clip.mp4").read_bytes()


def test_unwanted_file_is_left_while_in_progress(bench: Bench) -> None:
    source = bench.source(CLIP, kind="video", settings=b"")
    packets = Packets(bench, 3, lambda: bench.files.release(source.parts[0]))
    bench.tell("api0", Prepare("gone", "api0", 1, source, "r"))
    assert bench.heard("api0") == []
    assert packets.num_seen == 4
    assert bench.context.counter("messages_dropped_total").value == 1
    assert not bench.segments.blame_file("media0")
    assert bench.item(CLIP, kind="video", settings=b"").grid_thw[0] > 1


def test_unwanted_unit_is_left_while_in_progress(bench: Bench) -> None:
    settings = json.dumps({"mm_processor_kwargs": {"num_frames": 8}}).encode()
    item = bench.item(CLIP, kind="video", settings=settings)
    bench.wanted("whole", item, 3)
    (whole,) = bench.heard("scheduler")
    assert isinstance(whole, Pixels)
    again = bench.item(CLIP, kind="video", settings=settings)
    packets = Packets(bench, 3, lambda: bench.files.release(item.source.parts[0]))
    bench.wanted("gone", item, 2)
    (failed,) = bench.heard("scheduler")
    assert isinstance(failed, PixelsFailed)
    assert (failed.call_id, failed.status, packets.num_seen) == ("gone", 503, 4)
    bench.wanted("again", again, 3)  # of another request with the same video
    (pixels,) = bench.heard("scheduler")
    assert isinstance(pixels, Pixels)
    slab = bench.context_of("media0").pixel_slab("media0")
    assert slab.read(pixels.handle) == slab.read(whole.handle)


def test_decoding_ends_at_its_deadline(bench: Bench) -> None:
    source = bench.source(CLIP, kind="video", settings=b"")
    prepare = Prepare("late", "api0", 1, source, "r", deadline_ns=1 << 62)

    def end() -> None:
        bench.actor._hands = msgspec.structs.replace(prepare, deadline_ns=1)

    packets = Packets(bench, 3, end)
    bench.tell("api0", prepare)
    assert bench.heard("api0") == []
    assert packets.num_seen == 4


def test_file_with_uncounted_processor_time_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet may hold more pictures than are counted."""
    item = bench.item(CLIP, kind="video", settings=b"")
    monkeypatch.setattr("engine.media.actor.MAX_CPU_S", -1.0)  # any time is more, also one that the clock is too coarse for
    answer = bench.prepared(bench.source(CLIP + b"another", kind="video", settings=b""))
    assert (answer.status, answer.code) == (400, "invalid_video")
    assert "s of CPU time, the limit is -1; re-encode" in answer.message
    bench.wanted("a", item, 1)
    (failed,) = bench.heard("scheduler")
    assert isinstance(failed, PixelsFailed)
    assert (failed.status, failed.code) == (400, "invalid_video")


def test_facts_that_fit_no_record_are_refused(bench: Bench) -> None:
    """Longer facts would end the scheduler that asks for a unit, and the api that submits them."""
    source = msgspec.structs.replace(bench.source(PLAIN), kind="video")
    source = msgspec.structs.replace(source, parts=source.parts * 768)
    answer = bench.prepared(source)
    assert answer.item is not None
    limit = bench.actor.context.mailbox.max_record_bytes
    assert len(encode(WantPixels("c" * 100, "scheduler", 1, answer.item, 1, "r" * 100))) < limit
    bench.actor.context.mailbox.max_record_bytes = len(encode(answer)) + 1000
    answer = bench.prepared(source)
    assert (answer.status, answer.code) == (400, "invalid_video")
    assert "has 384 units" in answer.message


def test_expired_and_abandoned_files_are_skipped(bench: Bench) -> None:
    """The deadline has passed, or the client has left and with it the file."""
    source = bench.source(PLAIN)
    bench.tell("api0", Prepare("late", "api0", 1, source, "r", 1), Prepare("now", "api0", 1, source, "r", 1 << 62))
    (answer,) = bench.heard("api0")
    assert isinstance(answer, Prepared)
    assert answer.call_id == "now"
    assert bench.context.counter("messages_dropped_total").value == 1


def test_the_queue_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.media.actor.MAX_WAITING", 2)
    assert MAX_WAITING > 1000
    item = bench.item(PLAIN)
    for number in range(3):
        bench.wanted(str(number), item)
    answers = {message.call_id: message for message in bench.heard("scheduler") if isinstance(message, (Pixels, PixelsFailed))}
    assert [type(answers[name]) for name in "012"] == [Pixels, Pixels, PixelsFailed]
    assert getattr(answers["2"], "status", 0) == 503


def test_repeated_request_is_done_once(bench: Bench) -> None:
    item = bench.item(PLAIN)
    bench.wanted("twice", item)
    bench.wanted("twice", item)
    (answer,) = bench.heard("scheduler")
    assert isinstance(answer, Pixels)
    assert bench.context.counter("units_waiting").value == 0


def test_requests_of_a_dead_peer_are_dropped(bench: Bench) -> None:
    item = bench.item(PLAIN)
    bench.wanted("held", item)
    assert len(bench.heard("scheduler")) == 1
    bench.actor.on_message("scheduler", WantPixels("waiting", "scheduler", 1, item, 0, "r"))
    row = bench.segments.counters.actor("scheduler")
    row.begin_epoch(2, 0)
    bench.actor.on_peer("worker0", 2)  # to whom it never speaks
    bench.actor.on_peer("scheduler", 2)
    assert bench.heard("scheduler") == []
    assert bench.context.counter("pixel_slab_used_bytes").value == 0
    bench.actor.on_message("scheduler", WantPixels("stale", "scheduler", 1, item, 0, "r"))
    bench.actor.on_message("api0", Prepare("old", "api0", 1, item.source, "r"))
    bench.actor.on_peer("api0", 2)
    assert (bench.heard("api0"), bench.heard("scheduler")) == ([], [])


def test_requests_between_dead_processes_are_dropped(bench: Bench) -> None:
    """Requests are still in the ring, and their pixels would never be released."""
    item = bench.item(PLAIN)
    bench.segments.counters.actor("scheduler").begin_epoch(2, 0)
    bench.context.close()
    bench.start()
    bench.wanted("old", item)
    assert bench.heard("scheduler") == []
    bench.wanted("new", item, epoch=2)
    (answer,) = bench.heard("scheduler")
    assert isinstance(answer, Pixels)


def test_waiting_answers_do_not_reach_a_successor(bench: Bench) -> None:
    item = bench.item(PLAIN)
    for length in (4000, 0):
        while bench.context.outbox("scheduler").send(PixelsFailed("filler", 503, "t" * length)):
            pass
    bench.wanted("old", item)
    bench.loop.turn()
    bench.actor.on_peer("scheduler", 2)
    heard = [message for _ in range(9) for message in bench.heard("scheduler")]
    assert {message.call_id for message in heard if isinstance(message, (Pixels, PixelsFailed))} == {"filler"}


def test_early_requests_of_a_new_scheduler_are_kept(bench: Bench) -> None:
    """The first messages of a scheduler may come before the check of the peers' epochs: they are not its predecessor's."""
    item, other = bench.item(PLAIN), bench.item((VISION / "plain.jpg").read_bytes())
    bench.wanted("old", item)
    (old,) = bench.heard("scheduler")
    assert isinstance(old, Pixels)
    bench.actor.on_message("scheduler", WantPixels("mine", "scheduler", 2, other, 0, "r"))
    bench.actor.do_work()
    with pytest.raises(SharedMemoryError, match="released it"):
        bench.context_of("media0").pixel_slab("media0").read(old.handle)
    bench.actor.on_message("scheduler", WantPixels("next", "scheduler", 2, item, 0, "r"))
    bench.actor.on_peer("scheduler", 2)
    answers = bench.heard("scheduler")
    assert [answer.call_id for answer in answers if isinstance(answer, Pixels)] == ["mine", "next"]
    slab = bench.context_of("media0").pixel_slab("media0")
    assert all(slab.read(answer.handle) for answer in answers if isinstance(answer, Pixels))


def die_over(bench: Bench, item: MediaItem) -> None:
    """End the process while it has a file open, and start the next life."""
    DeathNotes.attach(bench.config.run_id, "media0").open(item.unit_hashes[0])
    assert bench.segments.blame_file("media0")
    bench.context.close()
    bench.start()


def test_file_that_killed_twice_is_refused(bench: Bench) -> None:
    item = bench.item(PLAIN)
    die_over(bench, item)
    die_over(bench, item)
    bench.wanted("a", item)
    (answer,) = bench.heard("scheduler")
    assert isinstance(answer, PixelsFailed)
    assert "died 2 times on this file" in answer.message
    refused = bench.prepared(item.source)
    assert (refused.status, refused.code) == (400, "image_parse_error")
    assert bench.item((VISION / "plain.jpg").read_bytes())


def test_death_is_forgotten_after_a_success(bench: Bench) -> None:
    item = bench.item(PLAIN)
    for _ in range(3):
        die_over(bench, item)
        bench.wanted("a", item)
        (answer,) = bench.heard("scheduler")
        assert isinstance(answer, Pixels)


@pytest.mark.parametrize(("end", "status"), [("while True: pass", -signal.SIGPROF), ("limit_silence(0)", 0)])
def test_a_decoder_that_never_returns_ends_the_process(end: str, status: int) -> None:
    code = f"from engine.media.actor import limit_silence\nlimit_silence(0.05)\n{end}"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=WATCHDOG_S, check=False).returncode == status


def test_memory_is_limited() -> None:
    code = """
from engine.media.actor import limit_memory
limit_memory(1 << 26)
bytearray(1 << 25)
try:
    bytearray(1 << 27)
except MemoryError:
    print("limited")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.stdout == "limited\n"


def test_features_of_a_client_are_cut_into_rows(bench: Bench) -> None:
    rows = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)
    file = BytesIO()
    np.save(file, rows)
    handle = bench.files.put(file.getvalue())
    assert handle is not None
    source = MediaSource("api0", (handle,), "image", is_features=True, grid_thw=(1, 4, 4))
    item = bench.prepared(source).item
    assert item is not None
    assert (item.grid_thw, item.tokens_per_unit) == ((1, 4, 4), 4)
    bench.wanted("a", item)
    (pixels,) = bench.heard("scheduler")
    assert isinstance(pixels, Pixels)
    made = bench.context_of("media0").pixel_slab("media0").read(pixels.handle)
    assert np.array_equal(np.frombuffer(made, np.float32).reshape(4, 64), rows)


@pytest.mark.parametrize("dtype", [r'"\ud800"', '"' + "\u20ac" * 20_000 + '"'])
def test_hostile_metadata_ends_no_process(bench: Bench, dtype: str) -> None:
    """Half a character fits no record, sixty thousand bytes not every ring: the answer would have ended each life again."""
    header = f'{{"rows": {{"dtype": {dtype}, "shape": [4, 64], "data_offsets": [0, 4]}}}}'.encode()
    source = bench.source(len(header).to_bytes(8, "little") + header + bytes(4), settings=b"")
    answer = bench.prepared(msgspec.structs.replace(source, is_features=True, grid_thw=(1, 4, 4)))
    assert (answer.item, answer.status, answer.code) == (None, 400, "invalid_features")


def test_rows_are_of_the_requested_file(bench: Bench) -> None:
    """The file that was read last is kept open and not confused with another one."""
    items: list[MediaItem] = []
    for number in range(2):
        file = BytesIO()
        np.save(file, np.full((4, 64), number, np.float32))
        source = bench.source(file.getvalue(), settings=b"")
        item = bench.prepared(msgspec.structs.replace(source, is_features=True, grid_thw=(1, 4, 4))).item
        assert item is not None
        items.append(item)
    for call, number in enumerate((0, 1, 0)):
        bench.wanted(str(call), items[number])
        (pixels,) = bench.heard("scheduler")
        assert isinstance(pixels, Pixels)
        made = bench.context_of("media0").pixel_slab("media0").read(pixels.handle)
        assert set(np.frombuffer(made, np.float32)) == {number}


def test_checked_file_is_not_decoded_again_soon(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.media.items.NUM_WHOLE", 2)
    work: list[int] = []
    for number in (1, 1, 2, 1, 3, 1, 2):
        before = bench.actor._items.num_pixels
        bench.item(blank(10, 10, number))
        work.append(bench.actor._items.num_pixels - before)
    assert work == [100, 0, 100, 0, 100, 0, 100]


def test_feature_hash_depends_on_the_grid(bench: Bench) -> None:
    """4 x 6 and 6 x 4 patches of the same rows have another order for the model."""
    file = BytesIO()
    np.save(file, np.zeros((6, 64), np.float32))
    source = bench.source(file.getvalue(), settings=b"")
    names: list[bytes] = []
    for grid in ((1, 4, 6), (1, 6, 4), (1, 2, 12)):
        item = bench.prepared(msgspec.structs.replace(source, is_features=True, grid_thw=grid)).item
        assert item is not None
        names += item.unit_hashes
    assert len({*names}) == 3


def test_feature_hash_depends_on_frame_distance(bench: Bench) -> None:
    """Their positions in time differ, and so does the KV of later tokens."""
    file = BytesIO()
    np.save(file, np.zeros((8, 64), np.float32))
    names: list[bytes] = []
    for settings in (b"", b'{"media_io_kwargs":{"video":{"fps":0.5}}}'):
        source = bench.source(file.getvalue(), kind="video", settings=settings)
        item = bench.prepared(msgspec.structs.replace(source, is_features=True, grid_thw=(2, 4, 4))).item
        assert item is not None
        names += item.unit_hashes
    assert len({*names}) == len(names)


def test_grid_is_checked_against_the_features(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing a million units would take seconds in which no other request is served."""
    file = BytesIO()
    np.save(file, np.zeros((8, 64), np.float32))
    monkeypatch.setattr("engine.media.items.unit_hash", unit_hash_of_few())
    source = bench.source(file.getvalue(), kind="video")
    answer = bench.prepared(msgspec.structs.replace(source, is_features=True, grid_thw=(1 << 20, 2, 2)))
    assert (answer.status, answer.code) == (400, "invalid_features")


def unit_hash_of_few() -> Callable[[bytes, int], bytes]:
    def few(name: bytes, index: int) -> bytes:
        assert index < 100
        return unit_hash(name, index)

    return few

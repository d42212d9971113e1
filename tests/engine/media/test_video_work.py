"""Cost of video before it is refused, whatever its container claims: work by packets and bytes, turns, tables."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from engine.errors import RequestError
from engine.media.movie_tables import checked_movie
from engine.media.video import BYTE_PIXELS, MAX_PROBED_BYTES, MAX_PROBED_PIXELS, Clip, pictures_in
from tests.engine.media.movies import (
    MOST,
    START,
    box,
    edits_of,
    hidden,
    items_of,
    jpeg,
    look,
    matroska,
    movie,
    tables,
    track,
    vp8,
    webm,
)
from tests.engine.media.visions import VISION

FRAME = 64 * 48  # pixels of clip.mp4
SIDE = 64 * 64  # of what vp8 makes
MANY = 50_000_000
DATA = (VISION / "clip.mp4").read_bytes()


def work_of(packets: list[bytes]) -> int:
    return sum(SIDE + BYTE_PIXELS * len(packet) for packet in packets)


def test_work_is_counted_by_packets_and_bytes() -> None:
    packets = vp8(2)
    packets = [packets[0], *[hidden(packets[1])] * 5, packets[1]]
    counted: list[int] = []
    clip = Clip([webm(packets)], 2.0, MOST, counted.append)
    clip.height = clip.width = 1  # as a header may claim
    assert sum(counted) == work_of(packets[:1])
    clip.frame(1)
    assert sum(counted) == work_of(packets)
    clip.frame(0)  # an earlier one: from the beginning
    assert sum(counted) == work_of([*packets, packets[0]])
    clip.close()


def test_frames_that_are_never_shown_end_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    (packet,) = vp8(1)
    counted: list[int] = []
    monkeypatch.setattr("engine.media.video.MAX_FIRST_PIXELS", work_of([packet] * 10))
    file = webm([hidden(packet)] * 30 + [packet])
    with pytest.raises(RequestError, match="pixels yields no frame of the video") as caught:
        Clip([file], 2.0, MOST, counted.append)
    assert (caught.value.status, caught.value.code) == (400, "invalid_video")
    assert sum(counted) == work_of([packet] * 11)
    Clip([webm([hidden(packet)] * 9 + [packet])], 2.0, MOST, counted.append).close()


def test_work_of_a_file_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames up to the last chosen one are decoded, however close the chosen ones are."""
    items = items_of("qwen3_vl")
    packets = vp8(12)
    file = webm(packets)
    monkeypatch.setattr("engine.media.video.MAX_FILE_PIXELS", work_of(packets))
    look(items, file, settings=b'{"mm_processor_kwargs": {"num_frames": 12}}')
    monkeypatch.setattr("engine.media.video.MAX_FILE_PIXELS", work_of(packets) - 1)
    with pytest.raises(RequestError, match=f"costs {work_of(packets)} pixels, the limit is .*; send a smaller") as e:
        look(items, file, settings=b'{"mm_processor_kwargs": {"num_frames": 12}}')
    assert (e.value.status, e.value.code) == (400, "invalid_video")


def test_hidden_frames_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container does not mark them: the inspection takes each packet for a frame."""
    shown, *_ = packets = vp8(2)
    packets = [shown, *[hidden(packets[1])] * 8, packets[1]]
    clip = Clip([webm(packets)], 2.0, MOST, int)
    monkeypatch.setattr("engine.media.video.MAX_FILE_PIXELS", work_of(packets) - 1)
    clip.check_work([0, 1])
    with pytest.raises(RequestError, match="send a smaller or shorter video"):
        clip.frame(1)
    clip.close()


def test_unit_is_decoded_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = b'{"mm_processor_kwargs": {"num_frames": 2}}'
    whole, parts = (items_of("qwen3_vl") for _ in range(2))
    item = look(whole, DATA, settings=settings)
    expected = whole.pixels(item, 0, [bytearray(DATA)])
    assert expected is not None
    monkeypatch.setattr("engine.media.items.MAX_TURN_PIXELS", 5 * FRAME)
    look(parts, DATA, settings=settings)
    found, num_turns = None, 0
    while found is None:
        before = parts.num_pixels
        found = parts.pixels(item, 0, [bytearray(DATA)])
        num_turns += 1
        assert parts.num_pixels - before <= 5 * FRAME + FRAME + BYTE_PIXELS * len(DATA)
    assert num_turns > 3
    assert np.array_equal(found, expected)
    for items in (whole, parts):
        items.close()


def test_two_units_of_a_file_both_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would restart the file in its turn and pass the frame that the other needs."""
    settings = b'{"mm_processor_kwargs": {"num_frames": 24}}'
    items, parts = items_of("qwen3_vl"), [bytearray(DATA)]
    item = look(items, DATA, settings=settings)
    expected = [items.pixels(item, index, parts) for index in range(12)]
    monkeypatch.setattr("engine.media.items.MAX_TURN_PIXELS", 1)
    waiting, num_turns = [6, 11], 0
    while waiting:
        for index in list(waiting):
            pixels = items.pixels(item, index, parts)
            num_turns += 1
            if pixels is not None:
                assert np.array_equal(pixels, expected[index])
                waiting.remove(index)
        assert num_turns < 200
    items.close()


def test_damaged_video_is_refused_each_time() -> None:
    """A decoder that failed in the middle must not continue with its last frame."""
    packets = vp8(4)
    packets[2] = b"\0" * 5
    file = webm(packets)
    items = items_of("qwen3_vl")
    for _ in range(2):
        item = look(items, file, settings=b'{"mm_processor_kwargs": {"num_frames": 4}}')
        assert items.pixels(item, 0, [bytearray(file)]) is not None
        for _ in range(2):
            with pytest.raises(RequestError, match="the video cannot be decoded"):
                items.pixels(item, 1, [bytearray(file)])
    items.close()


def test_repeated_identical_frames_are_refused() -> None:
    """A small file must not be read for minutes."""
    frame = jpeg() + bytes(4000)
    file = movie(frame, track(b"vide", tables(len(frame), 2, [START] * 2)))
    assert look(items_of("qwen2_5_vl"), file).grid_thw[0] >= 1
    with pytest.raises(RequestError, match="together they are larger than its file"):
        look(items_of("qwen2_5_vl"), movie(frame, track(b"vide", tables(len(frame), 60, [START] * 60))))


def test_too_large_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (packet,) = vp8(1)
    monkeypatch.setattr("engine.media.video.MAX_PACKET_BYTES", len(packet))
    Clip([webm([packet])], 2.0, MOST, int).close()
    monkeypatch.setattr("engine.media.video.MAX_PACKET_BYTES", len(packet) - 1)
    with pytest.raises(RequestError, match=f"has {len(packet)} bytes, the limit is {len(packet) - 1}; compress it more"):
        Clip([webm([packet])], 2.0, MOST, int)


def moof(count: int) -> bytes:
    run = box(b"trun", struct.pack(">II", 0, count))
    return box(b"moof", box(b"mfhd", bytes(8)), box(b"traf", box(b"tfhd", struct.pack(">II", 0, 1)), run))


@pytest.mark.parametrize(
    ("file", "claim"),
    [
        (movie(jpeg(), track(b"vide", tables(1, MANY, [START], MANY))), f"{MANY} samples, in 0 edits"),
        (movie(jpeg(), track(b"vide", tables(1, 20_000, [START], 20_000), edits_of(600))), "20000 samples, in 600 edits"),
        (movie(jpeg(), track(b"vide", tables(9, 1, [START])), behind=moof(MANY)), f"{MANY + 1} samples"),
        (
            movie(jpeg(), track(b"vide", [*tables(9, 1, [START]), box(b"ctts", struct.pack(">4I", 0, 1, MANY, 1))])),
            f"{MANY + 1} samples",
        ),
        (
            movie(
                jpeg(),
                track(b"vide", [*tables(9, 1, [START]), box(b"sbgp", struct.pack(">I4s3I", 0, b"sync", 1, MANY, 1))]),
            ),
            f"{MANY + 1} samples",
        ),
        (movie(jpeg(), box(b"udta", track(b"vide", tables(1, MANY, [START], MANY)))), f"{MANY} samples"),
        (movie(jpeg(), track(b"text", tables(1, MANY, [START], MANY))), f"{MANY} samples"),
        (movie(jpeg(), box(b"cmov", bytes(8))), "compressed QuickTime headers"),
    ],
    ids=["stsz", "elst", "trun", "ctts", "sbgp", "elsewhere", "text", "cmov"],
)
def test_tables_are_checked_before_allocation(file: bytes, claim: str) -> None:
    """FFmpeg would allocate all samples before the first is read."""
    assert len(file) < 16_000
    with pytest.raises(RequestError, match=claim) as caught:
        Clip([file], 2.0, MOST, int)
    assert (caught.value.status, caught.value.code) == (400, "invalid_video")


def test_samples_of_sound_are_not_limited() -> None:
    """Uncompressed sound has one for each value. It is hidden from FFmpeg, as it is not used."""
    picture, sound = track(b"vide", tables(len(jpeg()), 1, [START])), track(b"soun", tables(4, MANY, [START], MANY))
    file = movie(jpeg(), sound, picture)
    shown = checked_movie(file, 100)
    assert len(shown) == len(file)
    assert b"soun" not in shown
    assert shown.endswith(picture)
    clip = Clip([file], 2.0, MOST, int)
    assert (clip.num_frames, clip.width) == (1, 64)
    clip.close()


@pytest.mark.parametrize("header", [box, lambda name, content: struct.pack(">I4sQ", 1, name, 16 + len(content)) + content])
def test_media_data_may_contain_anything(header: Callable[[bytes, bytes], bytes]) -> None:
    table = tables(1, MANY, [START])[2]
    file = movie(jpeg(), track(b"vide", tables(9, 1, [START])))
    assert checked_movie(header(b"mdat", table) + file, 100)
    with pytest.raises(RequestError):
        checked_movie(header(b"free", table) + file, 100)


def test_truncated_movie_is_checked_to_its_end() -> None:
    file = movie(jpeg(), track(b"vide", tables(9, 1, [START]), edits_of(2)), behind=moof(1))
    for length in range(len(file)):
        checked_movie(file[:length], 100)


OBU_FRAME, OBU_HEADER, OBU_TILES = (kind << 3 | 2 for kind in (6, 3, 4))  # parts of AV1 that say how long they are


@pytest.mark.parametrize(
    ("codec", "packet", "num_pictures"),
    [
        ("h264", bytes(100), 1),
        ("vp9", bytes(100), 1),
        ("vp9", bytes(99) + b"\xc7", 8),
        ("av1", bytes([0x12, 0, OBU_FRAME, 2, 9, 9]), 1),
        ("av1", bytes([OBU_FRAME, 2, 9, 9] * 3 + [OBU_HEADER, 1, 9, OBU_TILES, 0]), 4),
        ("av1", bytes([OBU_FRAME | 4, 0, 0x82, 0, 9, 9, OBU_FRAME & ~2, 9]), 2),  # a longer header, a longer number, the rest
        ("av1", bytes([OBU_TILES, 0x80]), 1),  # ends within a number
        ("av1", b"\xff" * 50, 1),
    ],
)
def test_pictures_of_a_packet(codec: str, packet: bytes, num_pictures: int) -> None:
    assert pictures_in(codec, packet) == num_pictures


@pytest.mark.parametrize("part", [bytes([OBU_FRAME, 0]) * 65, bytes([OBU_TILES, 0]) * 1025])
def test_a_packet_of_too_many_pictures_is_refused(part: bytes) -> None:
    with pytest.raises(RequestError, match="a packet of the video has more than 64 pictures, or 1024 parts; re-encode it"):
        pictures_in("av1", part)


@pytest.mark.parametrize(("file", "guessed"), [(DATA, "yuv420p"), (webm(vp8(5)), None)], ids=["mp4", "webm"])
def test_opening_a_file_decodes_no_large_frames(file: bytes, guessed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would decode twenty to guess their order, uncounted: six seconds of the largest. Their frames are the same as
    others."""
    clips, formats = [], []
    for limit in (MAX_PROBED_PIXELS, 1):
        monkeypatch.setattr("engine.media.video.MAX_PROBED_PIXELS", limit)
        clips.append(Clip([file], 2.0, MOST, int))
        formats.append(clips[-1]._open().codec_context.pix_fmt)
        clips[-1].frame(0)
    assert formats == ["yuv420p", guessed]  # of MPEG-4 the headers tell
    for index in range(5):
        expected, found = (clip.frame(index) for clip in clips)
        assert found.tobytes() == expected.tobytes()
    for clip in clips:
        clip.close()


@pytest.mark.slow
def test_packets_of_subtitles_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 262 bytes has 256: only those that were read when the file was opened may remain."""
    looked: list[int] = []
    file = matroska(vp8(3), num_laced=MAX_PROBED_BYTES // 256 + 100)
    clip = Clip([file], 2.0, MOST, looked.append)
    assert clip.num_frames == 3
    assert MAX_PROBED_BYTES / 2 < len(looked) < MAX_PROBED_BYTES + 100
    clip.close()


def test_matroska_index_is_not_read() -> None:
    """FFmpeg sorts it while reading."""
    clip = Clip([matroska(vp8(3), num_cues=100)], 2.0, MOST, int)
    assert len(clip._container.streams.video[0].index_entries) == clip.num_frames == 3
    clip.close()


def test_a_movie_of_too_many_boxes_is_refused() -> None:
    with pytest.raises(RequestError, match=r"more than 300000 boxes at one level"):
        checked_movie(b"\0\0\0\x08free" * 300_001, 1000)


def test_empty_table_entries_are_counted() -> None:
    table = b"\0\0\0\0ctts\0\0\0\0" + (3000).to_bytes(4, "big") + bytes(8 * 3000)
    with pytest.raises(RequestError, match="the video's tables claim 6000 samples"):
        checked_movie(table * 2, 1000)

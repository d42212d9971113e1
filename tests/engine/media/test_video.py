"""Video: frames chosen, resized and grouped like transformers' processors, and files with false metadata."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image, ImageFont

from engine.checkpoint.families import media_rules
from engine.errors import RequestError
from engine.media.frames import FrameChoice, choose_frames
from engine.media.items import MediaItems
from engine.media.settings import MediaSettings
from engine.media.sizes import shared_size, usual_size, widened_size
from engine.media.video import _FFMPEG_OPTIONS, Clip, _refuse_to_open
from engine.messages import MediaSource
from tests.engine.media.movies import MOST, items_of, look
from tests.engine.media.visions import VISION, record_of

CLIPS: dict[str, Any] = json.loads((VISION / "clips.json").read_text())
RULES: dict[str, Any] = json.loads((VISION / "rules.json").read_text())


def test_frames_are_chosen_as_by_transformers() -> None:
    for kind, total, rate, fps, least, most, asked, first, last, count in RULES["choices"]:
        chosen = choose_frames(
            media_rules(kind).frame_spacing,
            FrameChoice(fps, least, most, asked),
            total,
            rate,
            1 if kind == "ernie4_5_vl_moe" else 2,
        )
        assert (chosen[:3], chosen[-3:], len(chosen)) == (first, last, count), (kind, total, rate, fps, least, most, asked)


def test_sides_are_rounded_as_by_transformers() -> None:
    rules = {"usual": usual_size, "paddleocr": widened_size, "shared": shared_size}
    for rule, height, width, factor, least, most, frames, expected in RULES["sizes"]:
        assert rules[rule](height, width, factor, least, most, frames) == tuple(expected), (rule, height, width)


@pytest.mark.parametrize("title", CLIPS)
def test_pixels_equal_torchvision_except_rounding(title: str) -> None:
    """torchvision's weights have fewer bits than Pillow's: one level for one value in a hundred, two for a few in a million."""
    family, name = title.split()
    expected = CLIPS[title]
    data = (VISION / name).read_bytes()
    items = items_of(family, expected["settings"])
    item = look(items, data)
    assert list(item.grid_thw) == expected["grid"]
    units = [items.pixels(item, index, [bytearray(data)]) for index in range(len(item.unit_hashes))]
    oracle = np.load(VISION / "clips.npz")[title]
    differences = np.abs(np.stack([units[0][0], units[-1][-1]]).astype(int) - oracle)
    assert differences.max() <= 2
    assert (differences > 1).mean() < 1e-3
    assert (differences == 1).mean() < 0.01
    again = items.pixels(item, 0, [bytearray(data)])  # an earlier one: the file is read anew
    assert np.array_equal(again, units[0])
    items.close()


def test_odd_frame_is_repeated_and_units_have_times() -> None:
    title = "qwen3_vl clip.mp4"
    chosen, data = CLIPS[title]["chosen"], (VISION / "clip.mp4").read_bytes()
    assert len(chosen) % 2 == 1
    items = items_of("qwen3_vl", CLIPS[title]["settings"])
    item = look(items, data)
    last = items.pixels(item, len(item.unit_hashes) - 1, [bytearray(data)])
    assert np.array_equal(last[0], last[1])
    times = [index / 10 for index in (*chosen, chosen[-1])]
    assert item.timestamps == pytest.approx([(times[unit] + times[unit + 1]) / 2 for unit in range(0, len(times), 2)])
    assert item.seconds_per_row == pytest.approx(2 / (len(chosen) / 25 * 10))
    assert len(set(item.unit_hashes)) == len(item.unit_hashes) == item.grid_thw[0]


def test_pictures_make_a_video_too() -> None:
    pictures = [(VISION / name).read_bytes() for name in ("plain.jpg", "plain.png", "turned1.jpg")]
    items = items_of("qwen2_5_vl")
    item = look(items, *pictures)
    assert item.grid_thw[0] == 2
    assert item.seconds_per_row == 1.0  # two frames a second
    parts = [bytearray(picture) for picture in pictures]
    units = [items.pixels(item, index, parts) for index in range(2)]
    assert np.array_equal(units[1][0], units[1][1])
    assert not np.array_equal(units[0][0], units[0][1])
    with pytest.raises(RequestError, match="has 3 frames, the limit is 2; send fewer"):
        look(items_of("qwen2_5_vl", {"max_frames": 2}), *pictures)


def test_times_use_the_font_of_the_checkpoint() -> None:
    """A font of Pillow replaces the checkpoint's."""
    font = ImageFont.load_default(10)
    assert isinstance(font, ImageFont.FreeTypeFont)
    data = (VISION / "clip.mp4").read_bytes()
    file = font.font_bytes
    plain = items_of("ernie4_5_vl_moe", {"draw_on_frames": False, "min_frames": 3}, **{"some.ttf": file})
    drawn = items_of("ernie4_5_vl_moe", {"font": "some.ttf", "min_frames": 3}, **{"some.ttf": file})
    items = [look(kind, data) for kind in (plain, drawn)]
    assert items[0].unit_hashes != items[1].unit_hashes
    pixels = [kind.pixels(item, 1, [bytearray(data)]) for kind, item in zip((plain, drawn), items, strict=True)]
    height = pixels[0].shape[1]
    differs = (pixels[0] != pixels[1]).any(axis=(0, 3))
    assert differs[: height // 4].any()
    assert not differs[height // 2 :].any()
    assert not np.array_equal(pixels[1][0], pixels[1][1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it starts with"),
        (b"hello, world", "not MP4, MOV, WebM, Matroska, AVI or GIF: it starts with 68 65 6c"),
        (b"#EXTM3U\nfile:///etc/passwd", "not MP4"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "not MP4"),
        ((VISION / "clip.mp4").read_bytes()[:40], "the video cannot be decoded"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "the video cannot be decoded"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        look(items_of("qwen2_5_vl"), data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_video")


def test_a_model_of_pictures_alone_refuses_video() -> None:
    record = record_of("qwen2_5_vl")
    vision = record.config.vision
    assert vision is not None
    blind = replace(vision, tokens=replace(vision.tokens, video=-1))
    items = MediaItems(blind, MediaSettings.of(record, {}, {}), {}, MOST, 4096, 1 << 28)
    with pytest.raises(RequestError, match="accepts images but no video") as caught:
        look(items, b"")
    assert caught.value.code == "unsupported_media"


def test_frames_are_counted_whatever_the_container_claims() -> None:
    data = bytearray((VISION / "clip.avi").read_bytes())
    place = data.index(b"avih") + 8 + 16  # dwTotalFrames
    data[place : place + 4] = (1 << 30).to_bytes(4, "little")
    clip = Clip([data], 2.0, MOST, int)
    assert clip.num_frames == 9
    clip.close()


def test_frames_larger_than_the_limit_are_refused() -> None:
    with pytest.raises(RequestError, match=r"frames have 64 x 48 pixels, the limit is 3071 \(--max-image-pixels\)"):
        Clip([bytearray((VISION / "clip.mp4").read_bytes())], 2.0, 3071, int)


def encoded(codec: str, container: str) -> bytes:
    """Return two frames of 64 x 48 with a colour in each quarter."""
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:24, :32], frame[:24, 32:], frame[24:, :32], frame[24:, 32:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
    file = BytesIO()
    with av.open(file, "w", format=container) as made:
        stream = made.add_stream(codec, rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for picture in (frame, frame, None):
            made.mux(stream.encode(None if picture is None else av.VideoFrame.from_ndarray(picture, format="rgb24")))
    return file.getvalue()


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("libx264", "mp4"),
        ("libx264", "mov"),
        ("mpeg4", "avi"),
        ("libvpx", "webm"),
        ("libvpx-vp9", "webm"),
        ("libx264", "matroska"),
    ],
)
def test_video_of_the_usual_codecs_is_seen(codec: str, container: str) -> None:
    clip = Clip([encoded(codec, container)], 2.0, MOST, int)
    assert (clip.num_frames, clip.width, clip.height) == (2, 64, 48)
    clip.close()


def test_units_beyond_the_servers_memory_are_refused() -> None:
    """Units are refused before pixels are requested that would never find room."""
    record = record_of("qwen2_5_vl")
    assert record.config.vision is not None
    settings = MediaSettings.of(record, {}, {})
    picture = (VISION / "large.jpg").read_bytes()
    for max_rows, max_bytes, limit in (
        (10, 1 << 28, r"10 \(--encoder-cache-size"),
        (4096, 999, r"999 \(--mm-processor-cache-gb"),
    ):
        items = MediaItems(record.config.vision, settings, record.files, MOST, max_rows, max_bytes)
        source = MediaSource("api0", (), "image")
        with pytest.raises(RequestError, match=limit) as caught:
            items.look(source, [bytearray(picture)], settings, b"n" * 32)
        assert caught.value.code == "image_too_large"


def test_ffmpeg_gets_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits hold for all streams of a file, before any is chosen."""
    told: list[dict[str, Any]] = []
    original = av.open

    def noted(file: Any, **options: Any) -> Any:
        told.append(options)
        return original(file, **options)

    monkeypatch.setattr("av.open", noted)
    Clip([(VISION / "clip.mp4").read_bytes()], 2.0, MOST, int).close()
    assert told
    for options in told:
        assert options["format"] == "mov"
        assert options["io_open"] is _refuse_to_open
        assert options["container_options"]["protocol_whitelist"] == ""
        assert "mpeg2video" not in options["container_options"]["codec_whitelist"].split(",")


def test_frame_of_another_size_is_checked_again() -> None:
    file = BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for index, size in enumerate(((64, 48), (804, 2))):
            picture = BytesIO()
            Image.new("RGB", size).save(picture, "JPEG")
            packet = av.Packet(picture.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, index, index, Fraction(1)
            container.mux(packet)
    clip = Clip([file.getvalue()], 2.0, MOST, int)
    with pytest.raises(RequestError, match="sides are 804 x 2, but the longer side may be at most 200 times"):
        clip.frame(1)
    clip.close()


@pytest.mark.parametrize(
    ("codec", "container", "name"),
    [
        ("mpeg2video", "mp4", "mpeg2video"),
        ("ffv1", "matroska", "ffv1"),
        ("rawvideo", "avi", "rawvideo"),
        ("flv", "avi", "flv1"),
    ],
)
def test_other_codecs_are_refused_by_name(codec: str, container: str, name: str) -> None:
    """FFmpeg has hundreds of codecs, most of them unmaintained."""
    with pytest.raises(RequestError, match=rf"codec is {name}, expected H\.264, HEVC, .*; convert it") as caught:
        Clip([encoded(codec, container)], 2.0, MOST, int)
    assert (caught.value.status, caught.value.code) == (400, "invalid_video")


def test_ffmpeg_opens_no_other_file_or_format() -> None:
    """A playlist is refused by its first bytes, and would open nothing in any case."""
    with pytest.raises(PermissionError, match="refers to another file"):
        _refuse_to_open("https://localhost/", 1, {})
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n"
    with pytest.raises(av.FFmpegError):
        av.open(BytesIO(playlist), format="hls", container_options=_FFMPEG_OPTIONS, io_open=_refuse_to_open)


@pytest.mark.parametrize(
    ("matrix", "corners"),
    [
        ((1, 0, 0, 1), "rgbw"),
        ((0, 1, -1, 0), "brwg"),
        ((-1, 0, 0, -1), "wbgr"),
        ((0, -1, 1, 0), "gwrb"),
        ((-1, 0, 0, 1), "wbgr"),
    ],
)
def test_phone_video_is_rotated_like_torchcodec(matrix: tuple[int, int, int, int], corners: str) -> None:
    """`corners`: torchcodec 0.14's result for the same files, by rows. It rotates a mirrored one too, and does not mirror
    it."""
    data = bytearray(encoded("mpeg4", "mp4"))
    place = data.index(b"tkhd") + 44  # version 0: where the matrix of the track header begins
    a, b, c, d = (int(value * 65536) for value in matrix)
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip = Clip([bytes(data)], 2.0, MOST, int)
    frame = np.asarray(clip.frame(1)) > 128
    assert (clip.width, clip.height) == frame.shape[1::-1] == ((48, 64) if abs(b) else (64, 48))
    found = [frame[y, x] for y in (4, -5) for x in (4, -5)]
    names = {(True, False, False): "r", (False, True, False): "g", (False, False, True): "b", (True, True, True): "w"}
    assert "".join(names[tuple(map(bool, colour))] for colour in found) == corners
    clip.close()


def test_truncated_file_repeats_its_last_frame() -> None:
    whole = (VISION / "clip.avi").read_bytes()
    clip = Clip([bytearray(whole)], 2.0, MOST, int)
    last = np.asarray(clip.frame(8))
    assert np.array_equal(np.asarray(clip.frame(20)), last)
    assert not np.array_equal(np.asarray(clip.frame(0)), last)
    clip.close()


def test_animated_gif_is_a_video() -> None:
    clip = Clip([bytearray((VISION / "moving.gif").read_bytes())], 2.0, MOST, int)
    assert (clip.num_frames, clip.fps) == (3, 10.0)
    with Image.open(BytesIO((VISION / "moving.gif").read_bytes())) as image:
        assert clip.frame(0).size == image.size
    clip.close()

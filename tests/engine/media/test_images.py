"""Pictures: the pixels of transformers' Pillow processors, and refusals before memory is taken."""

from __future__ import annotations

import hashlib
import resource
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from engine.errors import RequestError
from engine.media.images import decoded, pixels_of, sides_of, upright
from engine.media.settings import PictureSettings
from engine.media.video import Clip
from tests.engine.media.visions import PIXELS, VISION, settings_of

MODELS = {"old": "qwen2_5_vl", "bilinear": "qwen2_5_vl", "paddleocr_vl": "qwen2_5_vl"}  # their settings are changed below
MOST = 89_000_000


def picture_settings(processor: str) -> PictureSettings:
    settings = settings_of(MODELS.get(processor, processor), PIXELS[processor]["settings"]).picture
    return msgspec.structs.replace(settings, kind=processor if processor in ("paddleocr_vl",) else settings.kind)


def png(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("processor", PIXELS)
def test_pixels_equal_transformers(processor: str) -> None:
    settings = picture_settings(processor)
    for name, expected in PIXELS[processor]["files"].items():
        data = (VISION / name).read_bytes()
        pixels = pixels_of(decoded(data, MOST), settings)
        assert pixels.shape == (expected["height"], expected["width"], 3), name
        assert hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=16).hexdigest() == expected["digest"], name


@pytest.mark.parametrize("name", PIXELS["old"]["files"])
def test_header_gives_the_size_of_the_pixels(name: str) -> None:
    data = (VISION / name).read_bytes()
    image = upright(data, MOST)
    assert sides_of(data, MOST) == (image.height, image.width)


def test_large_picture_is_refused_before_memory_is_taken() -> None:
    header = bytearray(png(8, 8))
    header[16:24] = (65_500).to_bytes(4, "big") + (65_400).to_bytes(4, "big")
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    for data in (header, b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0"):
        for look in (sides_of, upright):
            with pytest.raises(RequestError, match=r"limit 89000000 \(--max-image-pixels\)") as caught:
                look(data, MOST)
            assert caught.value.code == "image_too_large"


@cache
def zeros(num_mib: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(num_mib)) + packer.flush()


def with_chunk(kind: bytes, content: bytes) -> bytes:
    """Return a PNG with one more chunk after its header."""
    file = png(8, 8)
    chunk = len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
    return file[:33] + chunk + file[33:]


def animation(kind: str, num_frames: int) -> bytes:
    frames = [Image.new("RGB", (8, 8), (index % 255, 0, 0)) for index in range(num_frames)]
    file = BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("make_data", "is_refused"),
    [
        (lambda: with_chunk(b"iCCP", b"x\0\0" + zeros(256)), True),
        (lambda: with_chunk(b"zTXt", b"x\0\0" + zeros(256)), True),
        (lambda: with_chunk(b"iTXt", b"x\0\1\0\0\0" + zeros(256)), True),
        (lambda: with_chunk(b"IDAT", zeros(256)), False),  # more than the sides need
        (lambda: animation("PNG", 500), False),
        (lambda: animation("GIF", 500), False),
        (lambda: animation("WEBP", 500), False),
        (lambda: animation("TIFF", 500), False),
    ],
    ids=["profile", "text", "international text", "pixels", "APNG", "GIF", "WEBP", "TIFF"],
)
def test_compression_bombs_take_little_memory(make_data: Callable[[], bytes], is_refused: bool) -> None:
    """Neither data beyond the stated pixels nor further frames are unpacked. Within 128 MiB more."""
    data = make_data()
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20), before[1]))
    try:
        with pytest.raises(RequestError) if is_refused else nullcontext():
            assert sides_of(data, MOST) == decoded(data, MOST).size == (8, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"", "image_parse_error", "the file is empty"),
        (b"hello, world", "unsupported_image_media_type", "not PNG, JPEG, WEBP, GIF, BMP or TIFF: it starts with 68 65 6c"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported_image_media_type", "convert it"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unsupported_image_media_type", "convert it"),
        (b"P6 2 2 255 123412341234", "unsupported_image_media_type", "convert it"),
        (png(9, 9)[:30], "image_parse_error", "cannot be decoded"),
        (b"\xff\xd8\xff\xe0", "image_parse_error", "cannot be decoded"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image_parse_error", "it ends before its dimensions"),
        (png(300, 1), "invalid_image", "sides of 300 x 1, but the longer side may be at most 200 times the shorter"),
    ],
)
def test_other_files_are_refused(data: bytes, code: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        sides_of(data, MOST)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_a_picture_of_many_scans_is_refused() -> None:
    """Each scan is a few bytes that make a decoder go through all pixels."""
    file = BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff", first + 10)
    assert sides_of(data[:second] + b"\xff\xfe\0\4\xff\xda" * 200 + data[second:], MOST) == (64, 64)  # comments
    for look in (sides_of, upright):
        with pytest.raises(RequestError, match="more than 100 scans"):
            look(data[:second] + data[first:second] * 100 + data[second:], MOST)


def test_a_frame_of_many_scans_is_refused() -> None:
    """A frame of a video is decoded without a heartbeat: the process would seem to hang."""
    file = BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff", first + 10)
    for num_scans, message in ((0, ""), (100, "more than 100 scans")):
        packet = av.Packet(data[:second] + data[first:second] * num_scans + data[second:])
        file = BytesIO()
        with av.open(file, "w", format="avi") as container:
            stream = container.add_stream("mjpeg", rate=1)
            stream.width = stream.height = 64
            stream.pix_fmt = "yuvj420p"
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, 0, 0, Fraction(1)
            container.mux(packet)
        with pytest.raises(RequestError, match=message) if message else nullcontext():
            assert Clip([file.getvalue()], 2.0, MOST, int).num_frames == 1


def test_truncated_picture_is_refused_at_decoding() -> None:
    data = (VISION / "large.jpg").read_bytes()
    assert sides_of(data[: len(data) // 2], MOST) == (500, 640)
    with pytest.raises(RequestError, match="truncated") as caught:
        decoded(data[: len(data) // 2], MOST)
    assert caught.value.code == "image_parse_error"


def test_odd_picture_sizes_are_refused_without_resizing() -> None:
    settings = settings_of("qwen2_5_vl", {"do_resize": False}).picture
    assert pixels_of(decoded(png(56, 28), MOST), settings).shape == (28, 56, 3)
    with pytest.raises(RequestError, match="multiples of 28 pixels, but are 57 x 28") as caught:
        pixels_of(decoded(png(57, 28), MOST), settings)
    assert caught.value.code == "invalid_image"

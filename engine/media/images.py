"""Images: facts about a file without its pixels, and its pixels as model input.

Bit for bit like transformers 5.23's Pillow processors: rotated by EXIF orientation, transparency on white, the first frame of
several, then one resize. Six formats, recognized by content, not by name. Sides are read and limited before memory is allocated
for pixels.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.media.refusal import decoding, parse_error, refuse
from engine.media.settings import PictureSettings
from engine.media.sizes import MAX_RATIO, is_too_long

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_ORIENTATION = 0x0112
_TURNED = range(5, 9)  # orientations that swap the sides
_MAX_CHUNKS = 100_000
_MAX_SCANS = 100  # of a JPEG; progressive ones have about ten
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # followed by a length, except the last; not within a scan's data
_START_OF_SCAN, _END = b"\xff\xda", b"\xff\xd9"

Image.MAX_IMAGE_PIXELS = None  # our own limit is more specific, and is checked before Pillow's
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # errors in a file are reported to the client


def format_of(data: bytes | bytearray) -> str:
    """Return the format by content. Raises RequestError if it is not accepted, or the file is empty."""
    if not data:
        raise parse_error("image", "the file is empty")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    found = next((name for start, name in _STARTS if data.startswith(start)), "")
    if not found:
        raise refuse(
            (
                f"the file is not {', '.join(FORMATS[:-1])} or {FORMATS[-1]}: it starts with {bytes(data[:8]).hex(' ')}; "
                "convert it"
            ),
            "unsupported_image_media_type",
        )
    return found


def sides_of(data: bytes | bytearray, max_pixels: int) -> tuple[int, int]:
    """Return height and width of the upright image, from its header. Raises RequestError if it is too large, too elongated or
    damaged."""
    with decoding("image"):
        if format_of(data) == "WEBP":
            _check_sides(*_webp_sides(data), max_pixels)  # Pillow allocates the memory when it opens one
        image = _open(data, max_pixels)
        height, width = image.height, image.width
        is_turned = image.format != "TIFF" and _orientation_of(image, data) in _TURNED  # Pillow swaps a TIFF's sides itself
        return (width, height) if is_turned else (height, width)


def pixels_of(image: Image.Image, settings: PictureSettings) -> Pixels:
    """Return uint8 [height, width, 3] for an image from `decoded`, in the size that `settings` require."""
    return resized(image, settings.size_of(image.height, image.width), settings.resample)


def decoded(data: bytes | bytearray, max_pixels: int) -> Image.Image:
    """Return the whole image, as `upright` does. Raises RequestError like `sides_of`, or if its data is damaged."""
    with decoding("image"):
        return upright(data, max_pixels)


def upright(data: bytes | bytearray, max_pixels: int) -> Image.Image:
    """Return the image in RGB, upright. Raises whatever the decoder raises."""
    if format_of(data) == "WEBP":
        _check_sides(*_webp_sides(data), max_pixels)
    image: Image.Image = _open(data, max_pixels)
    with _silence() if image.format == "TIFF" else nullcontext():
        ImageOps.exif_transpose(image, in_place=True)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def resized(image: Image.Image, size: tuple[int, int], resample: int) -> Pixels:
    """Return uint8 [height, width, 3] of an RGB image."""
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), resample=Image.Resampling(resample))
    return np.asarray(image)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep libtiff's messages about a client's file away from stderr, which is the log."""
    sys.stderr.flush()
    log, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(log, 2)
        os.close(log)
        os.close(nowhere)


def _open(data: bytes | bytearray, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(BytesIO(data), formats=[format_of(data)])
    except UnidentifiedImageError:
        raise parse_error("image", "its header is damaged") from None
    _check_sides(image.height, image.width, max_pixels)
    if image.format in ("JPEG", "MPO"):
        check_scans(data, "image")
    return image


def _check_sides(height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise parse_error("image", f"its size is {width} x {height}")
    if height * width > max_pixels:
        raise refuse(
            (
                f"the image has {width} x {height} = {width * height} pixels, limit {max_pixels} "
                "(--max-image-pixels); make it smaller"
            ),
            "image_too_large",
        )
    if is_too_long(height, width):
        raise refuse(
            (
                f"the image has sides of {width} x {height}, but the longer side may be at most {MAX_RATIO} times the "
                "shorter; crop it"
            ),
            "invalid_image",
        )


def check_scans(data: bytes | bytearray, kind: str) -> None:
    """Check the number of scans of a JPEG, which may be a frame of a video. Raises RequestError if there are too many. A
    decoder visits all pixels for each scan, and a scan can have a few bytes: there can be a million."""
    place = num_scans = 0
    for _ in range(_MAX_CHUNKS):
        marker = _MARKER.search(data, place)
        if marker is None or marker[0] == _END:
            return
        num_scans += marker[0] == _START_OF_SCAN
        if num_scans > _MAX_SCANS:
            break
        place = marker.end() + max(2, int.from_bytes(data[marker.end() : marker.end() + 2], "big"))
    raise parse_error(kind, f"it has more than {_MAX_SCANS} scans or {_MAX_CHUNKS} segments; save it again")


def _orientation_of(image: Image.Image, data: bytes | bytearray) -> int:
    """Return the orientation that `ImageOps.exif_transpose` finds. A PNG may have it after its pixels; only then it is
    decoded."""
    if image.format == "PNG" and not _has_late_words(data):
        exif: Any = Image.Image.getexif(image)
    else:
        exif = image.getexif()
    found = exif.get(_ORIENTATION, 1)
    return found if isinstance(found, int) else 1


def _has_late_words(data: bytes | bytearray) -> bool:
    """Return whether a PNG has chunks after the first pixels that may contain its orientation."""
    position, has_pixels = 8, False
    for _ in range(_MAX_CHUNKS):
        header = data[position : position + 8]
        if len(header) < 8:
            return False
        name = bytes(header[4:])
        if has_pixels and name in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            return True
        has_pixels = has_pixels or name == b"IDAT"
        position += 12 + int.from_bytes(header[:4], "big")
    return True


def _webp_sides(data: bytes | bytearray) -> tuple[int, int]:
    """Return height and width from the first chunk's header."""
    kind = bytes(data[12:16])
    if kind == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[27:30], "little"), 1 + int.from_bytes(data[24:27], "little")
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 " and len(data) >= 30:
        return int.from_bytes(data[28:30], "little") & 0x3FFF, int.from_bytes(data[26:28], "little") & 0x3FFF
    raise parse_error("image", "it ends before its dimensions")

"""Random pictures of a wanted size, as PNG files. Used by `tokamak bench serve` before the clock starts."""

from __future__ import annotations

import argparse
import struct
import zlib
from typing import Any

import numpy as np

from tools.attachments import part

BLOCK_PIXELS = 8  # per colour channel: the file has about 1/20 of the pixels' bytes, as photographs do


class Pictures:
    """Images of requests, used in rotation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._num_each = options.images_per_request
        count = options.num_prompts + options.warmup
        num_distinct = min(options.distinct_images or count * self._num_each, count * self._num_each)
        width, height = options.image_size
        files = (picture(width, height, options.seed + index) for index in range(num_distinct))
        self._parts = [part(file, "image/png") for file in files]

    def of(self, index: int) -> list[dict[str, Any]]:
        places = range(index * self._num_each, (index + 1) * self._num_each)
        return [self._parts[place % len(self._parts)] for place in places]


def image_size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= 16384 and 0 < int(height) <= 16384):
        raise argparse.ArgumentTypeError(f"must be WIDTHxHEIGHT of at most 16384 each, such as 448x448, is {text}")
    return int(width), int(height)


def picture(width: int, height: int, seed: int) -> bytes:
    """Return a PNG file, the same for the same seed."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (-(-height // BLOCK_PIXELS), -(-width // BLOCK_PIXELS), 3), np.uint8)
    pixels = blocks.repeat(BLOCK_PIXELS, axis=0).repeat(BLOCK_PIXELS, axis=1)[:height, :width]
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter type: none
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )

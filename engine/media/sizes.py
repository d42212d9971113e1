"""Sizes of images and frames before they are cut into patches: pure functions.

Every architecture rounds both sides to whole merged patches and keeps the number of pixels within two limits, with different
rules for very small ones; for video, qwen3_vl counts the pixels of all frames together. As in transformers 5.23; each function
names its processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_RATIO = 200  # of the longer to the shorter side

# height, width, factor (sides become multiples of it), minimum and maximum pixels, number of frames -> height, width
Rule = Callable[[int, int, int, int, int, int], tuple[int, int]]


def is_too_long(height: int, width: int) -> bool:
    """Return whether an image is too elongated for every architecture."""
    return max(height, width) > MAX_RATIO * min(height, width)


def usual_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
    """Return the size by Qwen2VLImageProcessor, Qwen2VLVideoProcessor and Ernie4_5_VLMoeImageProcessor: pixels per frame."""
    return _fitted(height, width, factor, min_pixels, max_pixels, 1, 1)


def widened_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
    """Return the size by PaddleOCRVLImageProcessor: a side shorter than `factor` is extended to it first."""
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return _fitted(height, width, factor, min_pixels, max_pixels, 1, 1)


def square_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
    """Return the size by Gemma3ImageProcessor: the same for all."""
    return factor, factor


def edge_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
    """Return the size by PixtralImageProcessor: sides are limited, and extended to whole merged patches."""
    edge = math.isqrt(max_pixels)
    ratio = max(height / edge, width / edge)
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    return math.ceil(height / factor) * factor, math.ceil(width / factor) * factor


def budget_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
    """Return the size by Gemma4ImageProcessor: as many pixels as allowed; a side shorter than `factor` is extended to it."""
    scale = math.sqrt(max_pixels / (height * width))
    rows, columns = (math.floor(scale * side / factor) for side in (height, width))
    longest = max_pixels // factor**2
    if not rows:
        rows, columns = 1, max(1, min(width // height, longest))
    elif not columns:
        rows, columns = max(1, min(height // width, longest)), 1
    return rows * factor, columns * factor


def shared_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
    """Return the size by Qwen3VLVideoProcessor: pixels of all frames together, at least two frames."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _fitted(height, width, factor, min_pixels, max_pixels, num_frames, round(num_frames / 2) * 2)


def _fitted(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int, rounded_frames: int
) -> tuple[int, int]:
    rounded = round(height / factor) * factor, round(width / factor) * factor
    num_pixels = rounded_frames * rounded[0] * rounded[1]
    if num_pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        return _at_least(factor, math.floor(height / shrink / factor)), _at_least(factor, math.floor(width / shrink / factor))
    if num_pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded


def _at_least(factor: int, count: int) -> int:
    return max(1, count) * factor

"""Chooses frames of a video: pure functions, as in transformers 5.23.

`num_frames` of the video, its frames per second, and the choice -> indices in ascending order. The choice is a number of
frames, or a rate within two limits.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import msgspec

Spacing = Literal["even", "whole rows", "steps"]


class FrameChoice(msgspec.Struct, frozen=True):
    """Requested frames. `num_frames` takes precedence; -1: all, up to `max_frames`."""

    fps: float
    min_frames: int
    max_frames: int
    num_frames: int = 0

    @property
    def most(self) -> int:
        """Most frames that can be chosen."""
        return self.num_frames if self.num_frames > 0 else self.max_frames


def choose_frames(spacing: Spacing, choice: FrameChoice, num_frames: int, fps: float, frames_per_row: int) -> list[int]:
    """Return at least one index. `spacing`: as in `MediaRules.frame_spacing`; `frames_per_row` frames are one temporal grid
    row."""
    if spacing == "even":
        return _evenly(num_frames, _wanted(choice, num_frames, fps))
    if spacing == "whole rows":
        return _in_steps(num_frames, _whole_rows(choice, num_frames, fps, frames_per_row))
    return _in_steps(num_frames, _wanted_within(choice, num_frames, fps))


def _wanted(choice: FrameChoice, num_frames: int, fps: float) -> int:
    """Return the number of frames as Qwen3VLVideoProcessor does."""
    asked = int(num_frames / fps * choice.fps)
    if choice.num_frames:
        asked = choice.num_frames if choice.num_frames > 0 else num_frames
        return min(asked, choice.max_frames, num_frames)
    return min(max(asked, choice.min_frames), choice.max_frames, num_frames)


def _wanted_within(choice: FrameChoice, num_frames: int, fps: float) -> float:
    """Return the number of frames as Ernie4_5_VLMoeVideoProcessor does, perhaps not an integer."""
    if choice.num_frames:
        return _wanted(choice, num_frames, fps)
    return min(max(num_frames / fps * choice.fps, choice.min_frames), choice.max_frames, num_frames)


def _whole_rows(choice: FrameChoice, num_frames: int, fps: float, frames_per_row: int) -> int:
    """Return as many frames as fill whole grid rows, as Qwen2VLVideoProcessor does."""
    if choice.num_frames:
        asked = round(_wanted(choice, num_frames, fps) / frames_per_row) * frames_per_row
        return max(1, min(asked, num_frames))
    most = math.floor(min(choice.max_frames, num_frames) / frames_per_row) * frames_per_row
    asked_rows = math.floor(min(max(num_frames / fps * choice.fps, choice.min_frames), most, num_frames) / frames_per_row)
    return max(1, asked_rows * frames_per_row)


def _evenly(num_frames: int, count: int) -> list[int]:
    """Return frames from the first to the last, evenly spaced."""
    step = (num_frames - 1) / max(1, count - 1)
    return [*(round(index * step) for index in range(max(1, count) - 1)), num_frames - 1 if count > 1 else 0]


def _in_steps(num_frames: int, count: float) -> list[int]:
    """Return frames from the first in equal steps, in float32 as torch.arange counts them."""
    step = num_frames / count
    return [min(int(_single(index * step)), num_frames - 1) for index in range(math.ceil(num_frames / step))]


def _single(value: float) -> float:
    """Return the value rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded

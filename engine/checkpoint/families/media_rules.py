"""Rules of a family for images and video. Read by the launcher, the tokenizer, the media processes and the ranks."""

from __future__ import annotations

from typing import Literal

import msgspec


class MediaRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a family prepares media; pixels and frames as (minimum, maximum)."""

    encoder: str  # class that computes the encoder, as module:class
    picture_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    clip_pixels: tuple[int, int] = (1, 1 << 40)  # per frame of a video, or for all frames
    num_frames: tuple[int, int] = (4, 768)
    max_video_tokens: int = 1
    sizing: Literal["area", "widened area", "square", "edge", "budget"] = "area"  # of pictures (`sizes.py`)
    resample: int = 3  # default filter, by Pillow's numbers
    adds_markers: bool = False  # templates write the placeholder without start and end token
    text_around: str = ""  # before the start token and after the end token; then the start token alone is the placeholder
    shares_clip_pixels: bool = False  # the limits of a video apply to all its frames together
    frame_spacing: Literal["even", "whole rows", "steps"] = "steps"  # for sampled video frames
    draws_times: bool = False  # the time is drawn on each frame
    has_times_in_text: bool = False  # the time of each frame is in the text before it
    has_times_in_positions: bool = False  # positions of temporal rows follow seconds; otherwise they are consecutive

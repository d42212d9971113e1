"""Rules of a family for pictures and video. Read by the launcher, the tokenizer, the media processes and the ranks."""

from __future__ import annotations

from typing import Literal

import msgspec


class MediaRules(msgspec.Struct, frozen=True, kw_only=True):
    """Pixels and frames: the least and the most."""

    encoder: str  # the class that computes it, as module:class
    picture_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    clip_pixels: tuple[int, int]  # per frame of a video, or for all frames
    num_frames: tuple[int, int] = (4, 768)
    max_video_tokens: int = 1
    widens_pictures: bool = False  # a side that is too short is made longer first
    shares_clip_pixels: bool = False  # the limits of a video hold for all its frames together
    frame_spacing: Literal["even", "whole rows", "steps"] = "steps"  # for sampled video frames
    draws_times: bool = False  # each frame has its time drawn on it
    has_times_in_text: bool = False  # each frame has its time in the text before it
    has_times_in_positions: bool = False  # rows in time are seconds apart, else one position

"""Settings for turning images and video into patches: from the checkpoint's processor files, the server's options, and the
request.

Pure. Read by the launcher (the largest unit) and by the media processes. A new checkpoint has one file with a part for each
processor; an older one has a file for each, or one for images that also applies to video. Sizes are in `size`, or in
`min_pixels` and `max_pixels`. Missing values are those of transformers 5.23. The server's options may set anything, a request
only less than the server allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.families import media_rules
from engine.checkpoint.processor_files import clip_options, picture_options
from engine.checkpoint.record import ModelRecord
from engine.checkpoint.vision_config import VisionConfig
from engine.errors import CheckpointError, OptionError, RequestError
from engine.media.frames import FrameChoice
from engine.media.refusal import refuse
from engine.media.sizes import Rule, budget_size, edge_size, shared_size, square_size, usual_size, widened_size

_FPS = 2.0
_RULES = {"area": usual_size, "widened area": widened_size, "square": square_size, "edge": edge_size, "budget": budget_size}
_MOST = 1 << 40
_PIXEL_KEYS = ("min_pixels", "max_pixels", "size")
_FRAME_KEYS = ("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
_KEYS = (*_PIXEL_KEYS, *_FRAME_KEYS)
_BUDGET = "max_soft_tokens"  # of pictures, the only setting with sizing by "budget"
_BUDGETS = (70, 140, 280, 560, 1120)
_GROUPS = ("images_kwargs", "videos_kwargs")  # of settings for a single kind


class PictureSettings(msgspec.Struct, frozen=True):
    """Settings of an image, without defaults: everything that affects pixels is here, and so in the hash."""

    kind: str  # name of the family, which determines the rules (`media_rules`)
    factor: int  # sides become multiples of it
    min_pixels: int
    max_pixels: int
    resample: int
    is_resizing: bool

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized."""
        return self._sized(_RULES[media_rules(self.kind).sizing], height, width, self.max_pixels, 1)

    @property
    def budget(self) -> int:
        """Tokens that all images are resized to nearly; 0: there is no such number."""
        return self.max_pixels // self.factor**2 if media_rules(self.kind).sizing == "budget" else 0

    @property
    def is_square(self) -> bool:
        """Whether all images have the same size."""
        return media_rules(self.kind).sizing == "square"

    def _sized(self, rule: Rule, height: int, width: int, max_pixels: int, num_frames: int) -> tuple[int, int]:
        if self.is_resizing:
            return rule(height, width, self.factor, self.min_pixels, max_pixels, num_frames)
        if self.is_square and (height, width) != (self.factor, self.factor):
            raise refuse(
                f"the image must have {self.factor} x {self.factor} pixels, but has {width} x {height}; resize it",
                "invalid_image",
            )
        if height % self.factor or width % self.factor:
            raise refuse(
                f"the sides must be multiples of {self.factor} pixels, but are {width} x {height}; resize it",
                "invalid_image",
            )
        return height, width


class ClipSettings(PictureSettings, frozen=True):
    """Settings of a video."""

    frames: FrameChoice
    frames_per_row: int
    max_video_tokens: int  # 0: unlimited
    font: str  # for drawing the time on each frame; empty: it is not drawn

    def frame_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Return the height and width that each of `num_frames` frames is resized to."""
        max_pixels = self.max_pixels
        if media_rules(self.kind).shares_clip_pixels:
            if self.max_video_tokens:
                share = min(self.max_video_tokens * self.factor**2, max_pixels // num_frames)
                max_pixels = max(share, int(self.min_pixels * 1.05)) * num_frames
            return self._sized(shared_size, height, width, max_pixels, max(2, num_frames))
        if self.max_video_tokens:
            total = int(self.max_video_tokens * self.factor**2 * 0.9)
            max_pixels = max(min(max_pixels, total * self.frames_per_row // num_frames), int(self.min_pixels * 1.05))
        return self._sized(usual_size, height, width, max_pixels, num_frames)


class MediaSettings(msgspec.Struct, frozen=True):
    """Settings of images and video."""

    picture: PictureSettings
    clip: ClipSettings

    @staticmethod
    def of(record: ModelRecord, processor_kwargs: Mapping[str, Any], io_kwargs: Mapping[str, Any]) -> MediaSettings:
        """Read the settings of a vision model and the server's options. Raises CheckpointError or OptionError if one of them is
        wrong."""
        vision = record.config.vision
        assert vision is not None
        directory = Path(record.path)
        try:
            picture = _picture_settings(vision, picture_options(record.files, directory).values)
            clip = _clip_settings(vision, clip_options(record.files, directory).values, record.files)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"its processor files are invalid: {error}") from None
        try:
            return MediaSettings(picture, clip).changed(processor_kwargs, io_kwargs)
        except RequestError as error:
            raise OptionError(f"--mm-processor-kwargs, --media-io-kwargs: {error.message}") from None

    def for_request(self, settings: bytes) -> MediaSettings:
        """Return the settings with a request's own (see MediaSource). Raises RequestError if it asks for more than the server
        allows."""
        if not settings:
            return self
        given = json.loads(settings)
        changed = self.changed(given.get("mm_processor_kwargs") or {}, given.get("media_io_kwargs") or {})
        asked, allowed = changed.clip.frames, self.clip.frames
        for name, value, limit in (
            (_BUDGET, changed.picture.budget, self.picture.budget),
            ("max_pixels of images", changed.picture.max_pixels, self.picture.max_pixels),
            ("max_pixels of video", changed.clip.max_pixels, self.clip.max_pixels),
            ("fps", asked.fps, allowed.fps),
            ("min_frames", asked.min_frames, allowed.min_frames),
            ("max_frames", asked.max_frames, allowed.max_frames),
            ("num_frames", asked.num_frames, allowed.most),
        ):
            if value > limit:
                raise refuse(f"{name} {value:g} is more than the server's {limit:g}; request less", "invalid_value")
        if asked.most <= allowed.most:
            return changed
        fewer = msgspec.structs.replace(asked, max_frames=allowed.most, min_frames=min(asked.min_frames, allowed.most))
        return MediaSettings(changed.picture, msgspec.structs.replace(changed.clip, frames=fewer))

    def changed(self, processor_kwargs: Mapping[str, Any], io_kwargs: Mapping[str, Any]) -> MediaSettings:
        """Return the settings with other values. Raises RequestError for an unknown setting or a wrong value."""
        given = {"image": dict(processor_kwargs), "video": dict(processor_kwargs)}
        for kind in given:
            for name, values in ((f"{kind}s_kwargs", processor_kwargs), (kind, io_kwargs)):
                given[kind] |= _asked(lambda values, name=name: _object(name, values.get(name)), values)
        keys = (_BUDGET,) if media_rules(self.picture.kind).sizing == "budget" else _KEYS
        unknown = {*io_kwargs} - {*given} | {*given["image"], *given["video"]} - {*keys, *_GROUPS}
        if unknown:
            raise refuse(f"unknown setting {', '.join(sorted(unknown))}; available: {', '.join(keys)}", "invalid_value")
        picture = msgspec.structs.replace(self.picture, **_changed_pixels(self.picture, given["image"]))
        frames = msgspec.structs.replace(self.clip.frames, **_changed_frames(given["video"]))
        clip = msgspec.structs.replace(self.clip, frames=frames, **_changed_pixels(self.clip, given["video"]))
        return MediaSettings(picture, clip)

    @property
    def max_frame_pixels(self) -> int:
        """Most pixels of an image or frame. A limit shared by frames counts at least two of them."""
        least_frames = 2 if media_rules(self.clip.kind).shares_clip_pixels else 1
        edge = math.isqrt(self.picture.max_pixels)
        if media_rules(self.picture.kind).sizing == "edge":
            return math.prod(self.picture.size_of(edge, edge))
        return max(self.picture.max_pixels, self.clip.max_pixels // least_frames, self.picture.factor**2)


def _picture_settings(vision: VisionConfig, file: Mapping[str, Any]) -> PictureSettings:
    return PictureSettings(**_common(vision, file, media_rules(vision.kind).picture_pixels))


def _clip_settings(vision: VisionConfig, file: Mapping[str, Any], files: Mapping[str, bytes]) -> ClipSettings:
    rules = media_rules(vision.kind)
    least, most = rules.num_frames
    frames = FrameChoice(
        _positive("fps", file.get("fps") or _FPS, float),
        _positive("min_frames", file.get("min_frames") or least, int),
        _positive("max_frames", file.get("max_frames") or most, int),
        _positive("num_frames", file.get("num_frames") or 0, int, least=0),
    )
    tokens = _positive("max_video_tokens", file.get("max_video_tokens") or rules.max_video_tokens, int)
    font = str(file.get("font") or next((name for name in files if name.endswith((".ttf", ".otf"))), ""))
    is_drawing = rules.draws_times and file.get("draw_on_frames", True) and font in files
    return ClipSettings(
        **_common(vision, file, rules.clip_pixels),
        frames=frames,
        frames_per_row=vision.temporal_patch_size,
        max_video_tokens=tokens if file.get("cap_pixels_per_frame") else 0,
        font=font if is_drawing else "",
    )


def _common(vision: VisionConfig, file: Mapping[str, Any], limits: tuple[int, int]) -> dict[str, Any]:
    merge = vision.spatial_merge_size
    for name, expected in (("patch_size", vision.patch_size), ("merge_size", merge), ("pooling_kernel_size", merge)):
        given = file.get(name, expected)
        if given not in (expected, {"height": expected, "width": expected}):
            raise ValueError(f"{name} {given} differs from the model's {expected}")
    for name in ("do_pan_and_scan", "do_center_crop"):
        if file.get(name):
            raise ValueError(f"{name} {file[name]!r} is not supported; remove it")
    rules = media_rules(vision.kind)
    pixels = dict(zip(("min_pixels", "max_pixels"), limits, strict=True))
    if rules.sizing == "square":
        side = vision.square_side
        _check_square(file, side)
        pixels = {"min_pixels": side * side, "max_pixels": side * side}
    elif rules.sizing == "budget":
        pixels |= _budget(file, vision.merged_pixels) or {"max_pixels": _BUDGETS[2] * vision.merged_pixels**2}
        longest = pixels["max_pixels"] // vision.merged_pixels**2 * merge
        if longest > vision.num_places:
            raise ValueError(f"{longest} patches of the longest side are more than position_embedding_size {vision.num_places}")
        if not file.get("do_resize", True):
            raise ValueError("do_resize false is not supported; remove it")
    else:
        pixels |= _pixels(file, rules.sizing == "edge")
    return {
        "kind": vision.kind,
        "factor": vision.square_side if rules.sizing == "square" else vision.merged_pixels,
        "resample": _positive("resample", file.get("resample") or rules.resample, int, least=0),
        "is_resizing": bool(file.get("do_resize", True)),
        **pixels,
    }


def _check_square(file: Mapping[str, Any], side: int) -> None:
    """Raise ValueError if images have another size than the model's."""
    size = file.get("size")
    sides = [size.get("height"), size.get("width")] if isinstance(size, dict) else [size, size]
    if size is not None and sides != [side, side]:
        raise ValueError(f"size {size!r} differs from the model's {side} x {side} pixels")


def _pixels(given: Mapping[str, Any], is_edge: bool = False) -> dict[str, int]:
    """Return the pixel limits among some settings; the older names take precedence, as in transformers. `is_edge`: `size` is
    the longest side."""
    size = given.get("size")
    size = {"longest_edge": size} if is_edge and isinstance(size, int) else _object("size", size)
    found: dict[str, int] = {}
    if is_edge:
        sides = {size.get(name) for name in ("longest_edge", "height", "width")} - {None}
        if len(sides) > 1:
            raise ValueError(f"size {size!r} is not supported; its sides should be equal")
        if sides:
            found["max_pixels"] = _positive("longest_edge", sides.pop(), int) ** 2
        if given.get("max_pixels") is not None:
            found["max_pixels"] = _positive("max_pixels", given["max_pixels"], int)
        return found
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        values = [value for value in (given.get(name), size.get(edge), size.get(name)) if value is not None]
        if values:
            found[name] = _positive(name, values[0], int)
    return found


def _budget(given: Mapping[str, Any], side: int) -> dict[str, int]:
    """Return the pixel limit of a number of tokens, squares of `side` pixels each; nothing if it is not given."""
    value = given.get(_BUDGET)
    if value is None:
        return {}
    if isinstance(value, bool) or value not in _BUDGETS:
        raise ValueError(f"{_BUDGET} {value!r} should be one of {', '.join(map(str, _BUDGETS))}")
    return {"max_pixels": int(value) * side * side}


def _changed_pixels(settings: PictureSettings, given: Mapping[str, Any]) -> dict[str, int]:
    if media_rules(settings.kind).sizing == "budget":
        return _asked(lambda given: _budget(given, settings.factor), given)
    is_edge = media_rules(settings.kind).sizing == "edge"
    found = _asked(lambda given: _pixels(given, is_edge), given)
    if settings.is_square and any(given.get(name) is not None for name in _PIXEL_KEYS):
        raise refuse(
            f"{', '.join(name for name in _PIXEL_KEYS if given.get(name) is not None)} cannot be set: all images have "
            f"{settings.factor} x {settings.factor} pixels; remove it",
            "invalid_value",
        )
    least, most = found.get("min_pixels", settings.min_pixels), found.get("max_pixels", settings.max_pixels)
    if "max_pixels" in found and "min_pixels" not in found:
        least = found["min_pixels"] = min(least, most)
    if not least <= most:
        raise refuse(f"min_pixels {least} is more than max_pixels {most}; give a smaller one", "invalid_value")
    return found


def _changed_frames(given: Mapping[str, Any]) -> dict[str, Any]:
    def read(given: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {} if given.get("do_sample_frames", True) else {"num_frames": -1}
        for name in _FRAME_KEYS[:4]:
            if given.get(name) is not None:
                least = -1 if name == "num_frames" else 1
                found[name] = _positive(name, given[name], float if name == "fps" else int, least)
        if "max_frames" in found and "min_frames" not in found:
            found["min_frames"] = 1
        if "fps" in found and "num_frames" not in found:
            found["num_frames"] = 0
        return found

    return _asked(read, given)


def _asked(read: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read(given)
    except (TypeError, ValueError) as error:
        raise refuse(str(error), "invalid_value") from None
    return found


def _object(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} {value!r} should be an object")
    return value


def _positive(name: str, value: Any, kind: type, least: float = 1) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is float:
        if not is_number or value <= 0:
            raise ValueError(f"{name} {value!r} should be a positive number")
        return float(value)
    if not is_number or int(value) != value or not least <= value <= _MOST:
        raise ValueError(f"{name} {value!r} should be an integer from {least} to {_MOST}")
    return int(value)

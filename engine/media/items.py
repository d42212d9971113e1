"""Facts about an item without its pixels, and the pixels of its units. Independent of processes.

An image is one unit. A unit of a video is the frames that the encoder computes together; if the last unit lacks frames, its
last frame is repeated. Features that a client encoded are cut into units as if they had been encoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.checkpoint.families import media_rules
from engine.checkpoint.vision_config import VisionConfig
from engine.media import features, images, video
from engine.media.frames import choose_frames
from engine.media.identity import item_hash, unit_hash
from engine.media.refusal import refuse
from engine.media.settings import MediaSettings
from engine.messages import MediaItem, MediaSource

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

Parts = list[bytearray]
NUM_WHOLE = 10_000
MAX_TURN_PIXELS = 400_000_000  # of a video in one turn: others wait a second or two
KEPT_PIXELS = 1 << 22  # of an image that was just inspected
MAX_OPEN_CLIPS = 4  # open videos with wanted units; each has a file and a decoder


class MediaItems:
    """Items of one model. `max_rows`: of the encoder arena. `max_bytes`: of the pixel slab. `beat` is called during long work.
    All methods raise RequestError if the item is wrong."""

    def __init__(
        self,
        vision: VisionConfig,
        settings: MediaSettings,
        files: dict[str, bytes],
        max_pixels: int,
        max_rows: int,
        max_bytes: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._vision = vision
        self._settings = settings
        self._files = files
        self._max_pixels = max_pixels
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._beat = beat
        self.num_pixels = 0  # decoded for all items; a float of features counts as one
        self._whole: dict[bytes, None] = {}  # images that were decoded without error, the latest last
        # The items used last, by the hash of the first unit: the same item, or its next unit, is usually requested next.
        self._picture: tuple[bytes, Image.Image] | None = None
        self._clips: dict[bytes, video.Clip] = {}  # the most recently used at the end
        self._rows: tuple[bytes, NDArray[np.float32]] | None = None

    def settings_of(self, source: MediaSource) -> MediaSettings:
        """Return the settings with the request's own."""
        return self._settings.for_request(source.settings)

    def name_of(self, source: MediaSource, parts: Parts, settings: MediaSettings) -> bytes:
        """Return the item's hash, over everything that affects its features."""
        facts: tuple[object, ...] = (source.kind, "features", source.grid_thw)
        if source.kind == "video":
            facts += (settings.clip.frames.fps,)  # affects positions, and so the KV of later tokens
        if not source.is_features:
            facts = (source.kind, settings.picture if source.kind == "image" else settings.clip)
        return item_hash(facts, parts)

    def look(
        self, source: MediaSource, parts: Parts, settings: MediaSettings, name: bytes, wanted: Container[bytes] = ()
    ) -> MediaItem:
        """Return facts about an item of these bytes with the hash `name`. `wanted`: as in `can_open`."""
        if source.kind == "video" and self._vision.video_token_id < 0:
            raise refuse("the model accepts images but no video; send frames as images", "unsupported_media")
        if source.is_features:
            return self._look_at_features(source, parts, settings, name)
        if source.kind == "image":
            height, width = images.sides_of(parts[0], self._max_pixels)
            item = self._item(source, name, self._grid_of(1, *settings.picture.size_of(height, width)))
            self._check_whole(item.unit_hashes[0], parts[0], height * width)
            return item
        first_hash = unit_hash(name, 0)
        has_room, is_kept = self._has_room(first_hash, wanted), False
        clip = self._opened(first_hash, parts, settings)
        try:
            chosen = self._chosen(clip, settings)
            clip.check_work(chosen)
            height, width = settings.clip.frame_size(clip.height, clip.width, len(chosen))
            is_kept = has_room
        finally:
            if not is_kept:
                self._close(first_hash)
        fps = clip.fps if clip.is_pictures else len(chosen) / clip.num_frames * clip.fps
        times = [index / clip.fps for index in self._padded(chosen)]
        return self._item(
            source, name, self._grid_of(len(times) // self._vision.temporal_patch_size, height, width), times, fps
        )

    def unit_bytes(self, item: MediaItem) -> int:
        """Return the bytes of the pixels or features of each unit."""
        return self._unit_bytes(item.source, item.grid_thw)

    def pixels(self, item: MediaItem, index: int, parts: Parts) -> np.ndarray[Any, np.dtype[Any]] | None:
        """Return the pixels of a unit: uint8 [frames, height, width, 3], or float32 [rows, width] of features. None: not there
        yet after `MAX_TURN_PIXELS` of a video; call again to go on."""
        if item.source.is_features:
            rows = self._vision.num_features_of(*item.grid_thw[1:])
            if self._rows is None or self._rows[0] != item.unit_hashes[0]:
                found = features.read_features(parts[0], rows * len(item.unit_hashes), self._vision.feature_width)
                self._rows = item.unit_hashes[0], found
                self.num_pixels += found.size
            return self._rows[1][index * rows : (index + 1) * rows]
        settings = self.settings_of(item.source)
        if item.kind == "image":
            kept, self._picture = self._picture, None
            if kept is not None and kept[0] == item.unit_hashes[0]:
                image = kept[1]
            else:
                image = images.decoded(parts[0], self._max_pixels)
                self.num_pixels += image.width * image.height
            return images.pixels_of(image, settings.picture)[None]
        clip = self._opened(item.unit_hashes[0], parts, settings)
        count = self._vision.frames_per_unit
        chosen = self._padded(self._chosen(clip, settings))[index * count : (index + 1) * count]
        size = item.grid_thw[1] * self._vision.patch_size, item.grid_thw[2] * self._vision.patch_size
        limit = self.num_pixels + MAX_TURN_PIXELS
        try:
            return clip.unit(
                index,
                lambda: video.pixels_of(clip, chosen, size, settings.clip, self._files.get(settings.clip.font, b"")),
                lambda: self.num_pixels < limit,
            )
        except BaseException:
            self._close(item.unit_hashes[0])  # its state is unknown
            raise

    def has_open(self, item: MediaItem) -> bool:
        """Return whether pixels of its units can be decoded without its bytes."""
        first_hash = item.unit_hashes[0]
        return first_hash in self._clips or (self._rows is not None and self._rows[0] == first_hash)

    def can_open(self, item: MediaItem, wanted: Container[bytes]) -> bool:
        """Return whether pixels of its units can be decoded now. A video cannot be opened while the maximum number of others
        with `wanted` units (by an item's first unit) is open: a video that is closed between two units must be decoded from its
        beginning again."""
        return item.kind != "video" or item.source.is_features or self._has_room(item.unit_hashes[0], wanted)

    def close(self) -> None:
        """Close all open videos."""
        for first_hash in list(self._clips):
            self._close(first_hash)

    def _check_whole(self, first_hash: bytes, data: bytearray, num_pixels: int) -> None:
        """Reject a damaged image before its pixels are requested; a checked one is not decoded again."""
        if first_hash in self._whole:
            del self._whole[first_hash]
        else:
            self.num_pixels += num_pixels
            image = images.decoded(data, self._max_pixels)
            self._picture = (first_hash, image) if image.width * image.height <= KEPT_PIXELS else None
        self._whole[first_hash] = None
        while len(self._whole) > NUM_WHOLE:
            del self._whole[next(iter(self._whole))]

    def _look_at_features(self, source: MediaSource, parts: Parts, settings: MediaSettings, name: bytes) -> MediaItem:
        """Return the item of features. Frames of a video that the client chose are assumed to be spaced as in the settings."""
        vision = self._vision
        grid = features.checked_grid(source.kind, source.grid_thw, vision)
        if len(parts) != 1:
            raise refuse(f"the features have {len(parts)} files, expected one", features.CODE)
        num_units = grid[0] * vision.temporal_patch_size // vision.frames_per_unit if source.kind == "video" else 1
        num_rows = num_units * vision.num_features_of(grid[1], grid[2])
        self.num_pixels += len(parts[0]) // 4
        features.read_features(parts[0], num_rows, vision.feature_width)  # before naming as many units as a grid may claim
        fps = settings.clip.frames.fps
        times = [index / fps for index in range(grid[0] * vision.temporal_patch_size)] if source.kind == "video" else []
        return self._item(source, name, grid, times, fps)

    def _item(
        self,
        source: MediaSource,
        name: bytes,
        grid: tuple[int, int, int],
        times: list[float] | None = None,
        fps: float = 0.0,
    ) -> MediaItem:
        """Return the item. `times`: of all frames of a video. `fps`: frames per second. Raises RequestError if its units are
        too large."""
        vision, count = self._vision, self._vision.frames_per_unit
        num_tokens = vision.num_tokens_of(grid[1], grid[2])
        num_bytes = self._unit_bytes(source, grid)
        if num_tokens > self._max_rows or num_bytes > self._max_bytes:
            raise refuse(
                f"a unit of the item has {num_tokens} tokens and {num_bytes} bytes of pixels, the limits are {self._max_rows} "
                f"(--encoder-cache-size) and {self._max_bytes} (--mm-processor-cache-gb); request less in mm_processor_kwargs",
                "image_too_large",
            )
        units = range(len(times) // count if times else 1)
        return MediaItem(
            source,
            source.kind,
            grid,
            tuple(unit_hash(name, index) for index in units),
            num_tokens,
            tuple((times[unit * count] + times[unit * count + count - 1]) / 2 for unit in units) if times else (),
            vision.temporal_patch_size / fps if times else 0.0,
        )

    def _grid_of(self, num_rows: int, height: int, width: int) -> tuple[int, int, int]:
        return num_rows, height // self._vision.patch_size, width // self._vision.patch_size

    def _unit_bytes(self, source: MediaSource, grid: tuple[int, int, int]) -> int:
        vision = self._vision
        if source.is_features:
            return 4 * vision.feature_width * vision.num_features_of(grid[1], grid[2])
        return 3 * grid[1] * grid[2] * vision.patch_size**2 * (vision.frames_per_unit if source.kind == "video" else 1)

    def _opened(self, first_hash: bytes, parts: Parts, settings: MediaSettings) -> video.Clip:
        """Return an open video; it stays open until `_has_room` closes it for another."""
        clip = self._clips.pop(first_hash, None)
        if clip is None:
            clip = video.Clip(list(parts), settings.clip.frames.fps, self._max_pixels, self._worked)
        self._clips[first_hash] = clip
        return clip

    def _has_room(self, first_hash: bytes, wanted: Container[bytes]) -> bool:
        """Return whether a video is open or may be opened; unwanted ones are closed for it."""
        if first_hash in self._clips:
            return True
        for other in [other for other in self._clips if other not in wanted]:
            if len(self._clips) >= MAX_OPEN_CLIPS:
                self._close(other)
        return len(self._clips) < MAX_OPEN_CLIPS

    def _close(self, first_hash: bytes) -> None:
        self._clips.pop(first_hash).close()

    def _worked(self, num_pixels: int) -> None:
        """Count decoded pixels of a video, and write the heartbeat."""
        self.num_pixels += num_pixels
        self._beat()

    def _chosen(self, clip: video.Clip, settings: MediaSettings) -> list[int]:
        """Return indices of the frames to use. Images sent as frames were chosen by the client."""
        choice = settings.clip.frames
        if clip.is_pictures:
            if clip.num_frames > choice.max_frames:
                raise refuse(
                    f"the video has {clip.num_frames} frames, the limit is {choice.max_frames}; send fewer", "invalid_video"
                )
            return list(range(clip.num_frames))
        spacing = media_rules(settings.clip.kind).frame_spacing
        return choose_frames(spacing, choice, clip.num_frames, clip.fps, settings.clip.frames_per_row)

    def _padded(self, chosen: list[int]) -> list[int]:
        """Return the frames with the last one repeated until the units are complete."""
        return chosen + [chosen[-1]] * (-len(chosen) % self._vision.frames_per_unit)

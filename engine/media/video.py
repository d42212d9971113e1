"""Video: how many frames a file has, and some of them, without ever holding more than a unit's.

A file of one of four containers (told by content; others may refer to further files) or pictures, one for each frame. Packets
are counted, whatever the container says of its frames. Frames are decoded from the first on; asking for a later one goes on
where the last ended, for an earlier one begins anew. Where a file has fewer frames than packets the last stands for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from engine.media.images import check_scans, resized, sides_of, upright
from engine.media.refusal import decoding, parse_error, refuse
from engine.media.settings import ClipSettings
from engine.media.sizes import MAX_RATIO, is_too_long

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FRAMES = 300_000  # of a file: more than two hours
MAX_SKIPPED_PIXELS = 6_000_000_000  # of frames between two that are chosen, which take half a minute or so to decode
_UNKNOWN_FPS = 24.0
_TEXT_SIZE = 0.1  # of a frame's shorter side; of the text, what surrounds it in white


class Clip:
    """A video that is open: its frames as they come, before they are chosen. RequestError: it is none, or too large."""

    def __init__(self, parts: list[bytes | bytearray], fps: float, max_pixels: int, beat: Callable[[], None]) -> None:
        """`fps`: of pictures that come as frames. `beat` is called for each frame and now and then."""
        self._beat = beat
        self._parts = parts
        self._max_pixels = max_pixels
        self._container: Any = None
        self._frames: Iterator[Image.Image] = iter(())
        self._position = -1  # of `_last`
        self._last: Image.Image | None = None
        self.is_pictures = len(parts) > 1
        if self.is_pictures:
            self.num_frames, self.fps = len(parts), fps
            self.height, self.width = sides_of(parts[0], max_pixels)
        else:
            with decoding("video"):
                self._look()

    def frame(self, index: int) -> Image.Image:
        """In red, green and blue."""
        if self.is_pictures:
            with decoding("video"):
                return upright(self._parts[index], self._max_pixels)
        with decoding("video"):
            if index < self._position or self._position < 0:
                self._rewind()
            while self._position < index:
                frame = next(self._frames, None)
                if frame is None:
                    break
                self._position, self._last = self._position + 1, frame
                self._beat()
        if self._last is None:
            raise parse_error("video", "none of its frames is whole")
        return self._last

    def check_gaps(self, chosen: list[int]) -> None:
        """RequestError: frames lie so far apart that those between would keep this process busy for too long."""
        if self.is_pictures:
            return
        gap = max(after - before for before, after in zip([-1, *chosen], chosen, strict=False))
        if gap * self.height * self.width > MAX_SKIPPED_PIXELS:
            raise refuse(
                f"the chosen frames lie {gap} frames of {self.width} x {self.height} apart, the limit is "
                f"{MAX_SKIPPED_PIXELS // (self.height * self.width)}; ask for more frames, or send a smaller or shorter video",
                "invalid_video",
            )

    def close(self) -> None:
        self._frames = iter(())
        if self._container is not None:
            self._container.close()
            self._container = None

    def _look(self) -> None:
        stream = self._open()
        self.num_frames = 0
        for packet in self._container.demux(stream):
            self.num_frames += bool(packet.size)
            if stream.codec_context.name == "mjpeg":
                check_scans(bytes(packet), "video")
            if self.num_frames % 1000 == 0:
                self._beat()
            if self.num_frames > MAX_FRAMES:
                raise refuse(f"the video has more than {MAX_FRAMES} frames; cut it", "invalid_video")
        if not self.num_frames:
            raise refuse("the video has no frames", "invalid_video")
        self.fps = float(stream.average_rate or 0) or _UNKNOWN_FPS
        if not math.isfinite(self.fps) or self.fps <= 0:
            self.fps = _UNKNOWN_FPS
        self.height, self.width = int(stream.height or 0), int(stream.width or 0)
        self._check(self.height, self.width)

    def _open(self) -> Any:
        import av  # much to load, which a start without video does not pay for

        self.close()
        self._container = av.open(BytesIO(self._parts[0]), format=_container_of(self._parts[0]), metadata_errors="ignore")
        stream = next(iter(self._container.streams.video), None)
        if stream is None:
            raise refuse("the file has no video stream", "invalid_video")
        stream.thread_type = "NONE"
        stream.codec_context.options = {"max_pixels": str(self._max_pixels), "threads": "1"}
        return stream

    def _rewind(self) -> None:
        stream = self._open()
        self._position, self._last = -1, None
        self._frames = self._decoded(stream)

    def _decoded(self, stream: Any) -> Iterator[Image.Image]:
        for frame in self._container.decode(stream):
            self._check(frame.height, frame.width)
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))

    def _check(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise parse_error("video", f"its sides are {width} x {height}")
        if height * width > self._max_pixels:
            raise refuse(
                f"the video's frames have {width} x {height} pixels, the limit is {self._max_pixels} (--max-image-pixels); "
                "make them smaller",
                "invalid_video",
            )
        if is_too_long(height, width):
            raise refuse(
                f"the video's sides are {width} x {height}, the longer may be {MAX_RATIO} times the shorter", "invalid_video"
            )


def pixels_of(clip: Clip, chosen: list[int], size: tuple[int, int], settings: ClipSettings, font: bytes) -> NDArray[np.uint8]:
    """uint8 [frames, height, width, 3] of the frames `chosen`, in ascending order."""
    made: list[NDArray[np.uint8]] = []
    for place, index in enumerate(chosen):
        if place and index == chosen[place - 1]:
            made.append(made[-1])  # an odd one, repeated
            continue
        frame = clip.frame(index)
        if settings.font:
            frame = _stamped(frame, index / clip.fps, font)
        made.append(resized(frame, size, settings.resample))
    return np.stack(made)


def _stamped(frame: Image.Image, seconds: float, font: bytes) -> Image.Image:
    """With its time in the upper left corner, black in white, as ernie4_5_vl_moe was trained on."""
    size = int(min(frame.size) * _TEXT_SIZE)
    if size < 1:
        return frame
    frame = frame.copy()
    minutes, rest = divmod(seconds, 60)
    text = f"time: {int(minutes // 60):02d}:{int(minutes % 60):02d}:{rest:05.02f}"
    ImageDraw.Draw(frame).text(
        (0, 0),
        text,
        font=ImageFont.truetype(BytesIO(font), size),
        fill=(0, 0, 0),
        stroke_width=int(size * _TEXT_SIZE),
        stroke_fill=(255, 255, 255),
    )
    return frame


def _container_of(data: bytes | bytearray) -> str:
    """FFmpeg's name of a container."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:4] == b"GIF8":
        return "gif"
    raise refuse(
        f"the file is no MP4, MOV, WebM, Matroska, AVI or GIF: it begins with {bytes(data[:8]).hex(' ')}; convert it",
        "invalid_video",
    )

"""Video: the number of frames of a file, and chosen frames, with at most the frames of a unit in memory.

A video is a file with one of four containers (recognized by content; others may refer to further files) and eight codecs, or
one image per frame. Packets are counted, regardless of the container's number of frames. Frames are decoded from the first on;
a later one continues from the last, an earlier one starts again. If a file has fewer frames than packets, the last frame is
used for the rest. Frames are rotated by quarters as the container says, because phones film upright with a horizontal sensor;
torchcodec (0.11 and later), with which transformers 5.23 reads video, rotates them too.

Work is counted in pixels, per decoded packet: the pixels of a frame in the decoder's current size, whether it is shown or not,
and `BYTE_PIXELS` for each byte. The work of a file depends only on the file; between two packets the caller may switch to other
work.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from engine.media.images import check_scans, resized, sides_of, upright
from engine.media.movie_tables import checked_movie
from engine.media.refusal import decoding, parse_error, refuse
from engine.media.settings import ClipSettings
from engine.media.sizes import MAX_RATIO, is_too_long

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_READ_RATIO = 2  # bytes of all frames relative to the file's: an index may name the same bytes repeatedly
MAX_PACKET_BYTES = 16 << 20  # of a frame, which is decoded in one piece: at most two seconds
MAX_FRAMES = 300_000  # per file: more than two hours
MAX_PACKETS = 4 * MAX_FRAMES  # of all streams; only one is decoded
MAX_FILE_PIXELS = 30_000_000_000  # of work up to the last chosen frame: minutes of turns
MAX_FIRST_PIXELS = 400_000_000  # up to the first frame, while no other request has a turn: two seconds
MAX_PROBED_BYTES = 1 << 17  # packets that FFmpeg keeps when it opens a file, with 150 bytes each, even for packets of one byte
MAX_PROBED_PIXELS = 4096 * 2304  # of a frame, about 20 of which it decodes then: half a second. No larger ones are decoded
MAX_OBUS = 1024  # per packet of AV1, which is decoded in one piece: an image has one, and one for each of its tiles
MAX_PACKET_PICTURES = 64  # most of them hidden
BYTE_PIXELS = 32  # dense H.264, HEVC, VP9: 6 to 9 MB per second and core; well-compressed frames: 100 to 500 million pixels
_CODECS = {
    "h264": "H.264",
    "hevc": "HEVC",
    "vp8": "VP8",
    "vp9": "VP9",
    "av1": "AV1",
    "mpeg4": "MPEG-4",
    "mjpeg": "Motion JPEG",
    "gif": "GIF",
}
_DECODERS = (*_CODECS, "libvpx", "libvpx-vp9", "libdav1d")  # FFmpeg's names for them
_CONTAINERS = ("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "gif")
_FFMPEG_OPTIONS = {
    "codec_whitelist": ",".join(_DECODERS),  # for all streams, which FFmpeg probes when it opens a file
    "format_whitelist": ",".join(_CONTAINERS),
    "protocol_whitelist": "",
    "probesize": str(MAX_PROBED_BYTES),
}
_MATROSKA_OPTIONS = {"fflags": "+ignidx"}  # its index, which FFmpeg sorts, is useless when everything is read
_TURNS = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)  # counterclockwise
_END = object()
_UNKNOWN_FPS = 24.0
_TEXT_SIZE = 0.1  # relative to a frame's shorter side; white border relative to the text


class Clip:
    """An open video: its frames in order, before they are chosen. Methods raise RequestError if it is invalid or too large."""

    def __init__(self, parts: list[bytes | bytearray], fps: float, max_pixels: int, worked: Callable[[int], None]) -> None:
        """`fps`: of images that are sent as frames. `worked` is called for each frame with its pixels, and now and then."""
        self._worked = worked
        self._parts = [bytes(part) for part in parts]  # BytesIO need not copy bytes
        self._max_pixels = max_pixels
        self._container: Any = None
        self._frames: Iterator[Any] = iter(())  # FFmpeg's frames; None: a packet that shows none
        self._position = -1  # of `_last`
        self._num_pixels = 0  # of work since the beginning
        self._packet_ends = array("q")  # end of each packet of a file, in bytes
        self._last: Any = None
        # index of a unit, and its decoding in progress
        self._making: tuple[int, Iterator[NDArray[np.uint8] | None]] | None = None
        self._made: tuple[int, NDArray[np.uint8]] | None = None  # a decoded unit that was not taken yet
        self.is_pictures = len(parts) > 1
        if self.is_pictures:
            self.num_frames, self.fps = len(parts), fps
            self.height, self.width = sides_of(parts[0], max_pixels)
        else:
            with decoding("video"):
                self._look()

    def frame(self, index: int) -> Image.Image:
        """Return a frame in RGB."""
        for _ in self.reach(index):
            pass
        return self.reached(index)

    def reach(self, index: int) -> Iterator[None]:
        """Decode up to a frame, a packet at a time."""
        if self.is_pictures:
            return
        if index < self._position or self._position < 0:
            with decoding("video"):
                self._rewind()
        while self._position < index:
            with decoding("video"):
                frame: Any = next(self._frames, _END)
            if frame is _END:
                return
            if frame is not None:
                self._position, self._last = self._position + 1, frame
            yield

    def reached(self, index: int) -> Image.Image:
        """Return the frame, once `reach` is complete."""
        if self.is_pictures:
            with decoding("video"):
                image = upright(self._parts[index], self._max_pixels)
            self._worked(image.width * image.height)
            return image
        if self._last is None:
            raise parse_error("video", "none of its frames is complete")
        with decoding("video"):
            return _shown(self._last)

    def unit(
        self, index: int, make: Callable[[], Iterator[NDArray[np.uint8] | None]], goes_on: Callable[[], bool]
    ) -> NDArray[np.uint8] | None:
        """Return a unit's pixels, from `pixels_of`. None: time for a pause; the next call continues with the unit in progress,
        whichever one it asks for: two callers that want different frames would otherwise restart in turn."""
        while self._made is None or self._made[0] != index:
            if self._making is None:
                self._making = index, make()
            pixels = next(self._making[1])
            if pixels is not None:
                self._made, self._making = (self._making[0], pixels), None
            elif not goes_on():
                return None
        made, self._made = self._made[1], None
        return made

    def check_work(self, chosen: list[int]) -> None:
        """Check the work of decoding the chosen frames. Raises RequestError if it takes too long, assuming the sides that the
        file claims."""
        if not self.is_pictures:
            self._check_pixels((chosen[-1] + 1) * self.height * self.width + BYTE_PIXELS * self._packet_ends[chosen[-1]])

    def _check_pixels(self, num_pixels: int) -> None:
        """Check the work up to here."""
        if num_pixels > MAX_FILE_PIXELS:
            raise refuse(
                f"decoding up to the last selected frame costs {num_pixels} pixels, the limit is {MAX_FILE_PIXELS}; send a "
                "smaller or shorter video",
                "invalid_video",
            )
        if self._position < 0 and num_pixels > MAX_FIRST_PIXELS:
            raise refuse(
                f"decoding {num_pixels} pixels yields no frame of the video, the limit is {MAX_FIRST_PIXELS}; re-encode it",
                "invalid_video",
            )

    def close(self) -> None:
        self._frames = iter(())
        if self._container is not None:
            self._container.close()
            self._container = None

    def _look(self) -> None:
        if _container_of(self._parts[0]) == "mov":
            self._parts[0] = checked_movie(self._parts[0], MAX_FRAMES)
        stream = self._open()
        self.num_frames = 0
        num_bytes = 0
        for num_packets, packet in enumerate(self._container.demux()):
            self._worked(0)
            if num_packets > MAX_PACKETS:
                raise refuse(f"the file has more than {MAX_PACKETS} packets in all streams; cut it", "invalid_video")
            if packet.stream.index != stream.index:
                continue
            num_bytes += packet.size
            if packet.size:
                pictures_in(stream.codec_context.name, packet)
                self.num_frames += 1
                self._packet_ends.append(num_bytes)
            if num_bytes > MAX_READ_RATIO * len(self._parts[0]):
                raise refuse("the video's frames overlap: together they are larger than its file", "invalid_video")
            if packet.size > MAX_PACKET_BYTES:
                raise refuse(
                    f"a frame of the video has {packet.size} bytes, the limit is {MAX_PACKET_BYTES}; compress it more",
                    "invalid_video",
                )
            if stream.codec_context.name == "mjpeg":
                check_scans(bytes(packet), "video")
            if self.num_frames > MAX_FRAMES:
                raise refuse(f"the video has more than {MAX_FRAMES} frames; cut it", "invalid_video")
        if not self.num_frames:
            raise refuse("the video has no frames", "invalid_video")
        self.fps = float(stream.average_rate or 0) or _UNKNOWN_FPS
        if not math.isfinite(self.fps) or self.fps <= 0:
            self.fps = _UNKNOWN_FPS
        if stream.height and stream.width:  # otherwise known with the first frame
            self._check(stream.height, stream.width)
        first = self.frame(0)
        self.height, self.width = first.height, first.width

    def _open(self) -> Any:
        import av  # slow to import, only needed for video
        from av.stream import Discard

        self.close()
        kind = _container_of(self._parts[0])
        self._container = av.open(
            BytesIO(self._parts[0]),
            format=kind,
            options={"max_pixels": str(MAX_PROBED_PIXELS)},
            container_options=_FFMPEG_OPTIONS | (_MATROSKA_OPTIONS if kind == "matroska" else {}),
            io_open=_refuse_to_open,
            metadata_errors="ignore",
        )
        stream = next(iter(self._container.streams.video), None)
        if stream is None:
            raise refuse("the file has no video stream", "invalid_video")
        codec = stream.codec_context.codec.canonical_name if stream.codec_context else "unknown"
        if codec not in _CODECS:
            raise refuse(f"the video's codec is {codec}, expected {', '.join(_CODECS.values())}; convert it", "invalid_video")
        for other in self._container.streams:
            if other.index != stream.index:
                other.discard = Discard.all  # unread: a block may be 256 packets of subtitles
        stream.thread_type = "NONE"
        stream.codec_context.options = {"max_pixels": str(self._max_pixels), "threads": "1"}
        return stream

    def _rewind(self) -> None:
        stream = self._open()
        self._position, self._last, self._num_pixels = -1, None, 0
        self._frames = self._decoded(stream)

    def _decoded(self, stream: Any) -> Iterator[Any]:
        for packet in self._container.demux(stream):
            frames = packet.decode()
            context = stream.codec_context
            num_pixels = 0
            if packet.size:
                num_pictures = pictures_in(context.name, packet)
                num_pixels = num_pictures * context.coded_width * context.coded_height + BYTE_PIXELS * packet.size
            self._num_pixels += num_pixels
            self._worked(num_pixels)
            if not frames:
                self._check_pixels(self._num_pixels)
                yield None
            for frame in frames:
                self._check_pixels(self._num_pixels)
                self._check(frame.height, frame.width)
                yield frame

    def _check(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise parse_error("video", f"its size is {width} x {height}")
        if height * width > self._max_pixels:
            raise refuse(
                f"the video's frames have {width} x {height} pixels, the limit is {self._max_pixels} (--max-image-pixels); "
                "make them smaller",
                "invalid_video",
            )
        if is_too_long(height, width):
            raise refuse(
                f"the video's sides are {width} x {height}, but the longer side may be at most {MAX_RATIO} times the "
                "shorter; crop it",
                "invalid_video",
            )


def pictures_in(codec: str, packet: Any) -> int:
    """Return how many images a packet contains, including hidden ones: those of a superframe of VP9 (its bitstream, Annex B),
    of a temporal unit of AV1 (5.3); one for others. Raises RequestError if there are too many."""
    if codec in ("vp9", "libvpx-vp9"):
        marker = memoryview(packet)[-1]
        return (marker & 7) + 1 if marker & 0xE0 == 0xC0 else 1
    if codec not in ("av1", "libdav1d"):
        return 1
    data, place, num_obus, num_pictures = memoryview(packet), 0, 0, 0
    while place < len(data) and num_obus <= MAX_OBUS and num_pictures <= MAX_PACKET_PICTURES:
        header, place = data[place], place + (2 if data[place] & 4 else 1)
        num_obus += 1
        num_pictures += header >> 3 & 15 in (3, 6)  # a frame header, a frame
        if not header & 2:
            break  # it takes the rest
        num_bytes = 0
        for shift in range(0, 56, 7):
            byte = data[place] if place < len(data) else 0
            num_bytes, place = num_bytes | (byte & 127) << shift, place + 1
            if byte < 128:
                break
        place += num_bytes
    if num_obus > MAX_OBUS or num_pictures > MAX_PACKET_PICTURES:
        raise refuse(
            f"a packet of the video has more than {MAX_PACKET_PICTURES} pictures, or {MAX_OBUS} parts; re-encode it",
            "invalid_video",
        )
    return max(1, num_pictures)


def _shown(frame: Any) -> Image.Image:
    """Return FFmpeg's frame in RGB, rotated as the container says."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    num_quarters = math.floor(abs(frame.rotation) / 90 + 0.5)
    turn = _TURNS[(num_quarters if frame.rotation > 0 else -num_quarters) % 4]
    return image.transpose(turn) if turn is not None else image


def pixels_of(
    clip: Clip, chosen: list[int], size: tuple[int, int], settings: ClipSettings, font: bytes
) -> Iterator[NDArray[np.uint8] | None]:
    """Yield None after each packet, and finally the frames `chosen`, in ascending order, as uint8 [frames, height, width,
    3]."""
    made: list[NDArray[np.uint8]] = []
    for place, index in enumerate(chosen):
        if place and index == chosen[place - 1]:
            made.append(made[-1])  # an odd number: the last one is repeated
            continue
        yield from clip.reach(index)
        frame = clip.reached(index)
        if settings.font:
            frame = _stamped(frame, index / clip.fps, font)
        made.append(resized(frame, size, settings.resample))
    yield np.stack(made)


def _stamped(frame: Image.Image, seconds: float, font: bytes) -> Image.Image:
    """Return the frame with its time in the upper left corner, black in white, as ernie4_5_vl_moe was trained on."""
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


def _refuse_to_open(*wanted: object) -> None:
    """Refuse to open another file that a video refers to, on the network or here."""
    raise PermissionError("it refers to another file")


def _container_of(data: bytes | bytearray) -> str:
    """Return FFmpeg's name of a container."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:4] == b"GIF8":
        return "gif"
    raise refuse(
        (f"the file is not MP4, MOV, WebM, Matroska, AVI or GIF: it starts with {bytes(data[:8]).hex(' ')}; convert it"),
        "invalid_video",
    )

"""Images and video: where their bytes are, and what is known about them without decoding pixels.

api -> media          Prepare           fetched bytes are in the api's media slab; returns their facts and number of tokens
media -> api          Prepared          facts, or why the item is refused
scheduler -> media    WantPixels        of units to encode; PixelsDone: they are encoded or no longer needed
media -> scheduler    Pixels            they are in the media process's pixel slab; PixelsFailed

Pixels are pulled, never pushed. An item is an image, a video, or features of one that a client encoded itself. A **unit** is
what the encoder computes separately: an image, or a temporal grid row of a video.
"""

from __future__ import annotations

import msgspec

from shm.slab import SlabHandle


class MediaSource(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An item as its client sent it. The bytes stay in the slab until the answer ends, so that pixels can be made again."""

    api: str  # the api process, or link, with the media slab
    parts: tuple[SlabHandle, ...]  # one part; for a video sent as images, one per frame
    kind: str  # "image" | "video"
    is_features: bool = False  # npy or safetensors of encoded rows instead of an image
    grid_thw: tuple[int, int, int] | None = None  # of features, as sent by the client
    settings: bytes = b""  # JSON object of the request's own mm_processor_kwargs and media_io_kwargs; empty: none


class MediaItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Facts about an item. They never change, even when processes die. No pixels."""

    source: MediaSource
    kind: str  # "image" | "video"
    grid_thw: tuple[int, int, int]  # patches (before merging): rows in time, height, width
    unit_hashes: tuple[bytes, ...]  # 32 bytes for each unit: over all bytes, the kind, the settings and the unit's index
    tokens_per_unit: int  # placeholder tokens; the same number of feature rows
    timestamps: tuple[float, ...] = ()  # seconds, of each unit of a video
    seconds_per_row: float = 0.0  # of a video, between two temporal grid rows


class MediaUnit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A unit at its place in a prompt: tokens [start, start + num_tokens). Positions of its tokens on the three axes are (base
    + time, base + row, base + column), where base is the largest position before + 1, or the base of the previous unit if
    `is_continued`."""

    item: int  # index among the request's items
    index: int  # of the unit in its item
    start: int
    num_tokens: int
    height: int  # rows and columns of tokens: num_tokens = height * width, or with a token of text between two rows
    width: int
    time: int = 0  # on the time axis, from base
    is_continued: bool = False  # has the same base as the previous unit (grid rows of a video without text between them)
    sees_all: bool = False  # its tokens attend to all of it, unless the request has key bounds


class Prepare(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    api_epoch: int
    source: MediaSource
    request: str  # the request whose turn is used, as in WantPixels
    deadline_ns: int = 0  # CLOCK_MONOTONIC, after which no request waits for it; 0: none


class Prepared(msgspec.Struct, tag=True, array_like=True, gc=False):
    """`item` is None if it is rejected: an HTTP status with OpenAI's error fields."""

    call_id: str
    item: MediaItem | None
    status: int = 200
    message: str = ""
    code: str = ""


class WantPixels(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Answered by one Pixels or PixelsFailed."""

    call_id: str
    scheduler: str
    scheduler_epoch: int
    item: MediaItem
    index: int  # of the unit in the item
    request: str  # one request that needs it: the group of its sequences


class Pixels(msgspec.Struct, tag=True, array_like=True, gc=False):
    """uint8 [frames, grid height * patch, grid width * patch, 3], or for features float32 [num_tokens, width], in the pixel
    slab of `media`, which keeps them until PixelsDone."""

    call_id: str
    media: str
    handle: SlabHandle


class PixelsFailed(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The requests that need the unit fail. Status 503: its bytes or the memory for pixels are gone; a retry may help."""

    call_id: str
    status: int
    message: str
    code: str = ""


class PixelsDone(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str


class Encode(msgspec.Struct, array_like=True, gc=False):
    """A unit for the ranks to encode into rows [first_row, first_row + num_rows) of the encoder arena."""

    unit_hash: bytes
    first_row: int
    num_rows: int
    height: int  # patches, before merging
    width: int
    media: str  # the media process with the pixels
    handle: SlabHandle
    is_features: bool = False


SLICE_ROWS = 128  # feature rows that the encoder computes at a time in a pass, unless there are fewer


class EncoderCall(msgspec.Struct, array_like=True, gc=False):
    """Parts [first_part, last_part) of the encoder's work on some units, run before the rows of the step that carries it. The
    encoder goes over the units' rows in `VisionConfig.num_passes` passes, each with the same number of parts of SLICE_ROWS
    feature rows. A call with first_part 0 starts anew; others continue with the state that the previous step left in the
    worker. The units' features are in the arena, headers included, when last_part is num_parts."""

    call_id: int
    units: list[Encode]
    first_part: int
    last_part: int
    num_parts: int

    @property
    def is_last(self) -> bool:
        return self.last_part == self.num_parts

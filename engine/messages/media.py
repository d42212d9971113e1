"""Pictures and video on their way: who holds which bytes, and what is known of them without looking at pixels.

api -> media          Prepare           bytes that were fetched lie in the api's media slab; what are they, and how many tokens?
media -> api          Prepared          facts, or why the item is refused
scheduler -> media    WantPixels        of units that are to be encoded; PixelsDone: they were, or nobody wants them any more
media -> scheduler    Pixels            they lie in the media process's pixel slab; PixelsFailed

Pixels are pulled, never pushed. An item is a picture, a video, or features of either that a client encoded itself. A **unit**
is what the encoder computes by itself: a picture, or a temporal grid row of a video.
"""

from __future__ import annotations

import msgspec

from shm.slab import SlabHandle


class MediaSource(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An item as its client sent it. The bytes stay in the slab until the answer ends, so that pixels can be made again."""

    api: str  # whose media slab
    parts: tuple[SlabHandle, ...]  # one; of a video that came as pictures one for each frame
    kind: str  # "image" | "video"
    is_features: bool = False  # npy or safetensors of encoded rows instead of a picture
    grid_thw: tuple[int, int, int] | None = None  # of features, as the client says
    settings: bytes = b""  # JSON object of the request's own mm_processor_kwargs and media_io_kwargs; empty: none


class MediaItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Facts about an item; they never change, whoever dies. No pixels."""

    source: MediaSource
    kind: str  # "image" | "video"
    grid_thw: tuple[int, int, int]  # patches (before merging): rows in time, height, width
    unit_hashes: tuple[bytes, ...]  # 32 bytes for each unit: of all bytes, the kind, the settings and the unit's index
    tokens_per_unit: int  # placeholder tokens, rows of features
    timestamps: tuple[float, ...] = ()  # seconds, of each unit of a video
    seconds_per_row: float = 0.0  # of a video, between two grid rows in time


class MediaUnit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A unit where it stands in a prompt: tokens [start, start + num_tokens). Positions of its tokens on the three axes are
    (base + time, base + row, base + column), where base is the largest position before + 1, or the base of the unit before it
    where that `is_continued`."""

    item: int  # index among the request's items
    index: int  # of the unit in its item
    start: int
    num_tokens: int
    height: int  # rows and columns of tokens: num_tokens = height * width
    width: int
    time: int = 0  # on the time axis, from base
    is_continued: bool = False  # its base is that of the unit before it (a video's rows, without text between)


class Prepare(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str
    api: str
    api_epoch: int
    source: MediaSource
    request: str  # in whose turn it is done, as in WantPixels
    deadline_ns: int = 0  # CLOCK_MONOTONIC, when nobody waits for it any more; 0: none


class Prepared(msgspec.Struct, tag=True, array_like=True, gc=False):
    """`item` is None where it is refused: an HTTP status with OpenAI's error fields."""

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
    request: str  # one that needs it: the group of its sequences


class Pixels(msgspec.Struct, tag=True, array_like=True, gc=False):
    """uint8 [frames, grid height * patch, grid width * patch, 3], or of features float32 [num_tokens, width], in the pixel slab
    of `media`, where the producer holds them until PixelsDone."""

    call_id: str
    media: str
    handle: SlabHandle


class PixelsFailed(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The requests that need the unit fail. Status 503: its bytes or the room for pixels are gone, another try may help."""

    call_id: str
    status: int
    message: str
    code: str = ""


class PixelsDone(msgspec.Struct, tag=True, array_like=True, gc=False):
    call_id: str


class Encode(msgspec.Struct, array_like=True, gc=False):
    """A unit that ranks encode into rows [first_row, first_row + num_rows) of the encoder arena."""

    unit_hash: bytes
    first_row: int
    num_rows: int
    height: int  # patches, before merging
    width: int
    media: str  # whose pixel slab
    handle: SlabHandle
    is_features: bool = False


SLICE_ROWS = 128  # of features: what the encoder computes of a pass at a time, unless there are fewer


class EncoderCall(msgspec.Struct, array_like=True, gc=False):
    """Parts [first_part, last_part) of what the encoder does for some units, before the rows of the step that carries it. It
    goes over their rows in `VisionConfig.num_passes` passes, each in as many parts, some SLICE_ROWS of features long. A call of
    first_part 0 begins anew; the others go on with what its step before left in the worker. Its units' features are in the
    arena, headers and all, when last_part is num_parts."""

    call_id: int
    units: list[Encode]
    first_part: int
    last_part: int
    num_parts: int

    @property
    def is_last(self) -> bool:
        return self.last_part == self.num_parts

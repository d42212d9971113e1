"""Checks the claims of an MP4 or MOV file about its content, before memory is allocated for it. Used by `video.py`.

Its tables (ISO 14496-12) are compressed: a kilobyte can claim 50 million samples, and FFmpeg takes about 40 bytes for each, and
again for each entry of an edit list that covers them. So claims are counted first. Sound is not decoded, and uncompressed sound
has a sample for each value, so its tables are blanked.

FFmpeg reads tables at any place among the boxes, so tables are searched everywhere except in the samples. Numbers in tables do
not look like names: names begin with a letter, and no file is large enough for such offsets.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

from engine.media.refusal import refuse

MAX_BOXES = 300_000  # per level: a fragment has two, and at least one frame
MAX_ENTRIES_PER_FRAME = 4  # claims of all tables per allowed frame: there are several tables and tracks
_COUNTED = re.compile(rb"stsz|stz2|ctts|elst|trun|sbgp|cmov")
_U32 = struct.Struct(">I")


def checked_movie(data: bytes, max_frames: int) -> bytes:
    """Return the file without its sound. Raises RequestError if its tables claim more than `max_frames` may need."""
    movie = _without_sound(data)
    others = _without_samples(movie)
    limit = MAX_ENTRIES_PER_FRAME * max_frames
    num_entries = num_edits = 0
    for found in _COUNTED.finditer(others):
        start = found.end() + 4  # after version and flags
        match found.group():
            case b"stsz" | b"stz2":
                num_entries += _number(others, start + 4)
            case b"trun":
                num_entries += _number(others, start)
            case b"ctts":
                num_entries += _sum_of_counts(others, start, limit)
            case b"sbgp":
                num_entries += _sum_of_counts(others, start + (8 if others[start - 4 : start - 3] == b"\1" else 4), limit)
            case b"elst":
                num_edits += _number(others, start)
            case b"cmov":
                raise refuse("compressed QuickTime headers are not supported; convert the video", "invalid_video")
        if num_entries * max(1, num_edits) > limit:
            raise refuse(
                f"the video's tables claim {num_entries} samples, in {num_edits} edits, the limit is {limit} for both "
                "multiplied; cut it, or convert it without edit lists",
                "invalid_video",
            )
    return movie


def _without_sound(data: bytes) -> bytes:
    tracks = [
        (start, stop)
        for name, first, end in _boxes(data, 0, len(data))
        if name == b"moov"
        for child, start, stop in _boxes(data, first, end)
        if child == b"trak" and _is_sound(data, start, stop)
    ]
    if not tracks:
        return data
    blanked = bytearray(data)
    for start, stop in tracks:
        blanked[start:stop] = bytes(stop - start)
    return bytes(blanked)


def _without_samples(data: bytes) -> bytes:
    kept, place = [], 0
    for name, first, end in _boxes(data, 0, len(data)):
        if name == b"mdat":
            kept.append(data[place:first])
            place = end
    return b"".join((*kept, data[place:]))


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name and content [first, last) of the boxes in [start, end), up to the first that is malformed."""
    num_boxes = 0
    while start + 8 <= end:
        num_bytes, first = _number(data, start), start + 8
        if num_bytes == 1 and start + 16 <= end:
            num_bytes, first = int.from_bytes(data[first : first + 8], "big"), first + 8
        elif num_bytes == 0:
            num_bytes = end - start
        if num_bytes < first - start:
            break
        num_boxes += 1
        if num_boxes > MAX_BOXES:
            raise refuse(f"the video has more than {MAX_BOXES} boxes at one level; convert it", "invalid_video")
        stop = min(start + num_bytes, end)
        yield data[start + 4 : start + 8], first, stop
        start = stop


def _is_sound(data: bytes, start: int, end: int) -> bool:
    """Return whether a track has handlers, all of them for sound."""
    handlers = {
        data[begin + 8 : begin + 12]
        for name, first, stop in _boxes(data, start, end)
        if name == b"mdia"
        for child, begin, _ in _boxes(data, first, stop)
        if child == b"hdlr"
    }
    return handlers == {b"soun"}


def _number(data: bytes, place: int) -> int:
    return int(_U32.unpack_from(data, place)[0]) if place + 4 <= len(data) else 0


def _sum_of_counts(data: bytes, place: int, limit: int) -> int:
    """Return the sum of the counts in a table's entries of (count, number), or the number of entries if that is larger, because
    each entry takes time. Stops beyond `limit` entries."""
    room = max(0, len(data) - place - 4) // 8
    num_entries = min(_number(data, place), room)
    if not 0 < num_entries <= limit:
        return num_entries
    counts = np.frombuffer(data, ">u4", 2 * num_entries, place + 4)[::2]
    return max(num_entries, int(counts.sum(dtype=np.uint64)))

"""Video files made by tests: MP4 box by box (ISO 14496-12), WebM of given packets, and Matroska element by element (RFC
9559)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
from PIL import Image

from engine.checkpoint.processor_files import VIDEO_PROCESSOR
from engine.media.items import MediaItems
from engine.media.settings import MediaSettings
from engine.messages import MediaItem, MediaSource
from tests.engine.media.visions import record_of

MOST = 89_000_000
START = 28  # of the samples in `movie`


def items_of(family: str, settings: dict[str, object] | None = None, **files: bytes) -> MediaItems:
    record = record_of(family, {VIDEO_PROCESSOR: settings or {}} | files)
    assert record.config.vision is not None
    return MediaItems(record.config.vision, MediaSettings.of(record, {}, {}), record.files, MOST, 4096, 1 << 28)


def look(items: MediaItems, *parts: bytes, settings: bytes = b"") -> MediaItem:
    source = MediaSource("api0", (), "video", settings=settings)
    found = items.settings_of(source)
    arrays = [bytearray(part) for part in parts]
    return items.look(source, arrays, found, items.name_of(source, arrays, found))


def box(name: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), name) + content


def tables(num_bytes: int, count: int, starts: Sequence[int], per_chunk: int = 1, step: int = 1) -> list[bytes]:
    """Return the tables of `count` samples of `num_bytes` bytes each, in chunks that begin at `starts`."""
    return [
        box(b"stts", struct.pack(">4I", 0, 1, count, step)),
        box(b"stsc", struct.pack(">5I", 0, 1, 1, per_chunk, 1)),
        box(b"stsz", struct.pack(">3I", 0, num_bytes, count)),
        box(b"stco", struct.pack(f">{2 + len(starts)}I", 0, len(starts), *starts)),
    ]


def track(kind: bytes, found: list[bytes], edits: bytes = b"") -> bytes:
    unity = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    entry = box(b"jpeg", bytes(6), struct.pack(">H16xHHIIIH32xHh", 1, 64, 64, 72 << 16, 72 << 16, 0, 1, 24, -1))
    if kind == b"soun":
        entry = box(b"sowt", bytes(6), struct.pack(">H8xHHIHH", 1, 2, 16, 0, 48000, 0))
    table = box(b"stbl", box(b"stsd", struct.pack(">II", 0, 1), entry), *found)
    link = box(b"dinf", box(b"dref", struct.pack(">II", 0, 1), box(b"url ", struct.pack(">I", 1))))
    media = box(
        b"mdia",
        box(b"mdhd", struct.pack(">5IHH", 0, 0, 0, 1000, 1000, 0, 0)),
        box(b"hdlr", bytes(8), kind, bytes(13)),
        box(b"minf", box(b"vmhd", struct.pack(">I8x", 1)), link, table),
    )
    header = box(b"tkhd", struct.pack(">6I16x", 3, 0, 0, 1, 0, 1000), unity, struct.pack(">II", 64 << 16, 64 << 16))
    return box(b"trak", header, edits, media)


def movie(samples: bytes, *tracks: bytes, behind: bytes = b"") -> bytes:
    unity = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    header = box(b"mvhd", struct.pack(">5IIHH8x", 0, 0, 0, 1000, 1000, 1 << 16, 256, 0), unity, bytes(24), struct.pack(">I", 2))
    return box(b"ftyp", b"isom\0\0\0\0isom") + box(b"mdat", samples) + box(b"moov", header, *tracks) + behind


def edits_of(count: int) -> bytes:
    """Return an edit list with `count` entries that show everything."""
    return box(b"edts", box(b"elst", struct.pack(">II", 0, count), struct.pack(">IiI", 1000, 0, 1 << 16) * count))


def jpeg() -> bytes:
    stored = BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(stored, "JPEG")
    return stored.getvalue()


def vp8(num_frames: int, side: int = 64) -> list[bytes]:
    """Return packets, each a key frame with noise of its own."""
    chance = np.random.default_rng(0)
    packets: list[bytes] = []
    with av.open(BytesIO(), "w", format="webm") as made:
        stream = made.add_stream("libvpx", rate=25, options={"deadline": "realtime", "cpu-used": "16", "g": "1"})
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for _ in range(num_frames):
            frame = av.VideoFrame.from_ndarray(chance.integers(0, 256, (side, side, 3), dtype=np.uint8), format="rgb24")
            packets += [bytes(packet) for packet in stream.encode(frame)]
        packets += [bytes(packet) for packet in stream.encode(None)]
    return packets


def hidden(packet: bytes) -> bytes:
    """Return the same key frame, marked as not shown (RFC 6386, 9.1)."""
    return bytes([packet[0] & ~0x10]) + packet[1:]


def webm(packets: list[bytes], side: int = 64) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format="webm") as made:
        stream = made.add_stream("libvpx", rate=25)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for index, content in enumerate(packets):
            packet = av.Packet(content)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, index, index, Fraction(1, 25)
            packet.is_keyframe = True
            made.mux(packet)
    return file.getvalue()


def element(name: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return name + struct.pack(">Q", len(content) | 1 << 56) + content


def matroska(packets: list[bytes], num_laced: int = 0, num_cues: int = 0) -> bytes:
    """Return VP8 video after `num_laced` blocks of 256 subtitle packets of one byte each, with an index of `num_cues` entries,
    the last time first."""
    sides = element(b"\xe0", element(b"\xb0", b"\x40"), element(b"\xba", b"\x40"))
    tracks = element(
        b"\x16\x54\xae\x6b",
        *(
            element(
                b"\xae",
                element(b"\xd7", number),
                element(b"\x73\xc5", number),
                element(b"\x83", kind),
                element(b"\x86", codec),
                more,
            )
            for number, kind, codec, more in ((b"\1", b"\1", b"V_VP8", sides), (b"\2", b"\x11", b"S_TEXT/UTF8", b""))
        ),
    )
    cues = element(
        b"\x1c\x53\xbb\x6b",
        *(
            element(
                b"\xbb",
                element(b"\xb3", struct.pack(">I", 1000 + index)),
                element(b"\xb7", element(b"\xf7", b"\1"), element(b"\xf1", b"\5")),
            )
            for index in reversed(range(num_cues))
        ),
    )
    laced = element(b"\xa3", b"\x82\0\0\x84\xff", b"x" * 256)  # of one size
    shown = [element(b"\xa3", b"\x81" + struct.pack(">H", index) + b"\x80", packet) for index, packet in enumerate(packets)]
    cluster = element(b"\x1f\x43\xb6\x75", element(b"\xe7", b"\0"), laced * num_laced, *shown)
    time_unit = element(b"\x15\x49\xa9\x66", element(b"\x2a\xd7\xb1", b"\x0f\x42\x40"))
    header = element(b"\x1a\x45\xdf\xa3", element(b"\x42\x82", b"matroska"))
    return header + element(b"\x18\x53\x80\x67", time_unit, tracks, cues, cluster)

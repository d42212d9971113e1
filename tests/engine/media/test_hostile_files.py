"""Untrusted files, changed at random: each is an item or a refusal with status 400, and the process keeps running."""

from __future__ import annotations

import json
import random
from io import BytesIO

import numpy as np
import pytest

from engine.errors import RequestError
from engine.media.items import MediaItems
from engine.media.settings import MediaSettings
from engine.messages import MediaSource
from tests.engine.media.visions import VISION, record_of

NUM_CHANGED = 60  # of each file
PICTURES = ("plain.png", "palette_alpha.png", "turned_late.png", "turned6.jpg", "progressive.jpg", "cmyk.jpg")
OTHERS = ("plain.webp", "moving.webp", "moving.gif", "plain.bmp", "plain.tif", "cmyk.tif")
CLIPS = ("clip.mp4", "clip.webm", "clip.avi")
SETTINGS = json.dumps({"mm_processor_kwargs": {"max_pixels": 3136}}).encode()


def features(form: str) -> bytes:
    rows = np.ones((4, 64), np.float32)
    if form == "npy":
        file = BytesIO()
        np.save(file, rows)
        return file.getvalue()
    header = json.dumps({"rows": {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, rows.nbytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + rows.tobytes()


def changed(data: bytes, chance: random.Random) -> bytes:
    """Return the file with bytes overwritten, most of them in headers, cut out, doubled, or the end missing."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(min(len(made), chance.choice((32, 256, len(made))))) if made else 0
        match chance.randrange(5):
            case 0:
                made[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                made[place : place + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x80"))
            case 2:
                del made[place : place + chance.randrange(1, 64)]
            case 3:
                made[place:place] = made[place : place + chance.randrange(1, 64)]
            case 4:
                del made[chance.randrange(len(made) + 1) :]
    return bytes(made)


@pytest.fixture(scope="module")
def items() -> MediaItems:
    record = record_of("qwen2_5_vl")
    assert record.config.vision is not None
    return MediaItems(record.config.vision, MediaSettings.of(record, {}, {}), record.files, 1 << 20, 4096, 1 << 26)


@pytest.mark.parametrize("name", [*PICTURES, *OTHERS, *CLIPS, "npy", "safetensors"])
def test_changed_files_are_items_or_refused(items: MediaItems, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    is_features = "." not in name
    kind = "video" if name in CLIPS else "image"
    data = features(name) if is_features else (VISION / name).read_bytes()
    chance = random.Random(name)
    grid = (1, 4, 4) if is_features else None
    source = MediaSource("api0", (), kind, is_features, grid, b"" if is_features else SETTINGS)
    refusals: list[RequestError] = []
    for _ in range(NUM_CHANGED):
        parts = [bytearray(changed(data, chance))]
        try:
            settings = items.settings_of(source)
            item = items.look(source, parts, settings, items.name_of(source, parts, settings))
            for index in (0, len(item.unit_hashes) - 1):
                pixels = items.pixels(item, index, parts)
                assert pixels.nbytes == items.unit_bytes(item)
        except RequestError as error:
            refusals.append(error)
    assert refusals
    assert all(refusal.status == 400 and refusal.code and "object at 0x" not in refusal.message for refusal in refusals)
    assert capfd.readouterr() == ("", "")  # no log says what is wrong with strangers' files

"""Features that clients encoded: two safe formats, and the numbers in every refusal."""

from __future__ import annotations

import json
import pickle
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.media.features import checked_grid, read_features
from engine.messages import Prepared, encode
from tests.engine.media.visions import record_of

VISION = record_of("qwen2_5_vl").config.vision
ROWS = np.arange(24, dtype=np.float32).reshape(4, 6) / 8


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    file = BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def safetensors(data: bytes, dtype: str = "F32", shape: tuple[int, ...] = (4, 6), **others: Any) -> bytes:
    header = json.dumps({"rows": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}} | others).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        npy(ROWS),
        npy(ROWS.astype(np.float16)),
        npy(ROWS.astype(">f8")),
        npy(np.asfortranarray(ROWS)),
        safetensors(ROWS.tobytes()),
        safetensors(ROWS.astype("<f2").tobytes(), "F16", __metadata__={"by": "test"}),
        safetensors((ROWS.view(np.uint32) >> 16).astype("<u2").tobytes(), "BF16"),
    ],
)
def test_rows_are_read_as_float32(data: bytes) -> None:
    found = read_features(bytearray(data), 4, 6)
    assert found.dtype == np.float32
    assert np.array_equal(found, ROWS)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        raise AssertionError("it was run")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy(ROWS[:3]), r"are \[3, 6\], expected \[4, 6\]"),
        (npy(ROWS[:, :5]), r"are \[4, 5\], expected \[4, 6\]"),
        (npy(ROWS.reshape(-1)), r"are \[24\], expected \[4, 6\]"),
        (npy(ROWS)[:-1], "has 95 bytes of data, but shape [4, 6] needs 96".replace("[", r"\[").replace("]", r"\]")),
        (npy(ROWS.astype(np.int64)), "of type int64, expected float16, float32 or float64"),
        (npy(np.array([{}], dtype=object), allow_pickle=True), "of type object"),
        (npy(np.full((4, 6), np.nan, np.float32)), "contain NaN or infinity"),
        (npy(np.full((4, 6), 1e300)), "contain NaN or infinity"),
        (pickle.dumps(ROWS), "neither npy nor safetensors; pickle"),
        (b"PK\x03\x04" + bytes(40), "neither npy nor safetensors; pickle"),
        (b"", "neither npy nor safetensors"),
        (safetensors(ROWS.tobytes(), "I32"), "of type I32, expected F64, F32, F16, BF16"),
        (
            safetensors(ROWS.tobytes(), more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
            "has 2 tensors, expected one",
        ),
        (safetensors(ROWS.tobytes())[:-4], "the tensor covers bytes 0 to 96 of 92"),
        (safetensors(ROWS.tobytes(), shape=(1 << 62, 6)), "needs"),
        (b"\xff" * 8 + b"{" + bytes(20), "neither npy nor safetensors"),
    ],
)
def test_invalid_features_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_features(bytearray(data), 4, 6)
    assert (caught.value.status, caught.value.code) == (400, "invalid_features")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (safetensors(ROWS.tobytes(), "\ud800"), r"of type \\ud800, expected"),
        (safetensors(b"", rows={"dtype": "F32", "shape": [4], "data_offsets": ["\udfff", 96]}), r"bytes \\udfff to 96"),
        (safetensors(b"", rows={"dtype": "F32", "shape": [4], "data_offsets": [[1e15] * 3000, 9]}), "bytes .*10000000"),
        (b"\x93NUMPY\x01\0\xff\xff" + b"\x01" * 65535, "cannot be read: .* "),
    ],
)
def test_refusal_fits_a_record_for_any_file(data: bytes, message: str) -> None:
    """A longer refusal would end the process that decodes files, and each life after it."""
    with pytest.raises(RequestError, match=message) as caught:
        read_features(bytearray(data), 4, 6)
    assert len(encode(Prepared("call", None, caught.value.status, caught.value.message, caught.value.code))) < 16384


def test_a_grid_that_no_item_has_is_refused() -> None:
    assert VISION is not None
    assert checked_grid("image", (1, 4, 6), VISION) == (1, 4, 6)
    for grid, message in (
        (None, "image_grid_thw is missing"),
        ((2, 4, 6), "the first of them 1 for an image"),
        ((1, 3, 6), r"is \[1, 3, 6\], expected multiples of \[1, 2, 2\]"),
        ((1, 0, 6), "expected three positive numbers"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            checked_grid("image", grid, VISION)
        assert caught.value.code == "invalid_features"

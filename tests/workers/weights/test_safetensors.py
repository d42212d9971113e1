"""The safetensors reader: every dtype, and every kind of damage to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from engine.errors import CheckpointError
from tests.workers.checkpoints import write_safetensors
from workers.weights.safetensors import SafetensorsFile

VALUES = np.array([[0.0, -1.5, 3.140625], [1e-3, 65504.0, -(2.0**-14)]], np.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("F32", 0), ("F64", 0), ("F16", 1e-3), ("BF16", 2**-7), ("U16", 2**-7)])
def test_every_dtype_is_read(dtype: str, tolerance: float, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": VALUES, "empty": np.zeros((0, 4), np.float32)}, dtype=dtype, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    found = file.tensors["x"].read()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, VALUES, rtol=tolerance)
    assert file.tensors["empty"].read().shape == (0, 4)
    assert file.metadata == {"format": "pt"}


def test_bfloat16_is_exact(tmp_path: Path) -> None:
    bits = np.arange(0x7F80, dtype=np.uint16)  # every finite non-negative bfloat16
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    write_safetensors(tmp_path / "a", {"x": exact}, dtype="BF16")
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "a").tensors["x"].read(), exact)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        SafetensorsFile(tmp_path / "none")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in ("empty", "fifo"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            SafetensorsFile(tmp_path / name)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 30, 120, -1])
def test_truncated_file_is_named(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": VALUES, "y": VALUES})
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated or damaged"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"x": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}', "x has dtype"),
        (b'{"x": 1}', "malformed"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}', "malformed"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "x has 4 bytes, which does not fit F32"),
        (b'{"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', "x has 8 bytes"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}', "x has 8 bytes"),
        (b'{"x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}', "dtype C64"),
        (b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', "should end at byte"),
    ],
)
def test_damaged_header_is_named(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_too_long_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + json.dumps({}).encode())
    with pytest.raises(CheckpointError, match="header should have"):
        SafetensorsFile(path)

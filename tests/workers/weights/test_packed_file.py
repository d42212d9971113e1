"""Files of packed weights that take many pieces to write: reads return the written values, and damage anywhere is detected."""

from __future__ import annotations

import os
import threading
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from ops import _cpu
from ops.weight_format import Memory
from workers.weights.packed_file import DamagedFileError, FileWriter, Layout, PackedFile

ARRAYS = {
    "odd": ((1_000_003,), np.dtype(np.uint8)),
    "empty": ((0, 4), np.dtype(np.float32)),
    "large": ((3, 1 << 20), np.dtype(np.float32)),  # larger than a piece
    "small": ((5,), np.dtype(np.float32)),
    "halves": ((2_500_000,), np.dtype(np.uint16)),
}


def values_of(name: str) -> np.ndarray:
    shape, dtype = ARRAYS[name]
    return np.random.default_rng(len(name)).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def fill_with(name: str, array: np.ndarray) -> None:
    array[...] = values_of(name)


def write(path: Path) -> None:
    layout = Layout()
    for name, (shape, dtype) in ARRAYS.items():
        layout.keep(name, shape, dtype, lambda array: None)
    with path.open("w+b") as file:
        writer = FileWriter(file.fileno(), layout, {"of": "a test"})
        for name, (shape, dtype) in ARRAYS.items():
            writer.keep(name, shape, dtype, lambda array, name=name: fill_with(name, array))
        writer.finish()
        assert os.fstat(file.fileno()).st_size == writer.num_bytes


def read_all(path: Path) -> None:
    file = PackedFile(path)
    for name, (shape, dtype) in ARRAYS.items():
        file.keep(name, shape, dtype, lambda array: None)


def test_stored_arrays_are_read_back(tmp_path: Path) -> None:
    write(tmp_path / "weights")
    file = PackedFile(tmp_path / "weights")
    assert file.description["of"] == "a test"
    for name, (shape, dtype) in ARRAYS.items():
        array = file.keep(name, shape, dtype, lambda array: None)
        assert array.tobytes() == values_of(name).tobytes()
        assert array.ctypes.data % 64 == 0


def test_parts_are_filled_one_by_one(tmp_path: Path) -> None:
    """Two reused buffers serve, so that an array of many parts is never held whole."""
    before = _cpu.num_threads()
    _cpu.set_num_threads(2)  # buffers are sized for them
    shape = (300, 1 << 18)
    expected = np.arange(300, dtype=np.uint8)[:, None]
    counts = (1, 60, 39, 1, 99, 100)  # some are larger than a room
    filled: list[tuple[int, int]] = []

    def fill(first: int, part: np.ndarray) -> None:
        part[...] = expected[first : first + len(part)]
        filled.append((part.ctypes.data, part.nbytes))

    fills = [(count, partial(fill, first)) for count, first in zip(counts, accumulate(counts, initial=0), strict=False)]
    layout = Layout()
    layout.keep("parts", shape, expected.dtype, fills)
    with (tmp_path / "weights").open("w+b") as file:
        writer = FileWriter(file.fileno(), layout, {})
        room = writer._room.nbytes
        places = [(rows.ctypes.data, rows.ctypes.data + room) for rows in (writer._room, writer._other_room)]
        writer.keep("parts", shape, expected.dtype, fills)
        writer.finish()
    _cpu.set_num_threads(before)
    for address, num_bytes in filled:
        is_small = num_bytes <= room - (2 << 20)
        assert any(begin <= address and address + num_bytes <= end for begin, end in places) == is_small
    assert len(filled) == len(counts)
    assert min(num_bytes for _, num_bytes in filled) < room < max(num_bytes for _, num_bytes in filled)
    for store in (PackedFile(tmp_path / "weights"), Memory()):
        kept = store.keep("parts", shape, expected.dtype, fills)
        assert (kept == expected).all()


@pytest.mark.slow
def test_any_changed_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write(path)
    size = path.stat().st_size
    for place in (0, 30, 2 << 20, 4 << 20, (4 << 20) + 8, size // 2, size - 5_000_000, size - 1):
        content = bytearray(path.read_bytes())
        content[place] ^= 0x10
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(DamagedFileError):
            read_all(tmp_path / "damaged")


def test_unused_parts_are_not_checked(tmp_path: Path) -> None:
    """A rank reads its rows of "large", which has three pieces of its own size."""
    path = tmp_path / "weights"
    write(path)
    content = bytearray(path.read_bytes())
    content[13_200_000] ^= 1  # in its last row
    path.write_bytes(content)
    file = PackedFile(path)
    shape, dtype = ARRAYS["large"]
    for rows in ([(0, 1)], [(0, 1), (1, 2)]):
        assert file.keep("large", shape, dtype, lambda array: None, rows)[0].tobytes() == values_of("large")[0].tobytes()
    with pytest.raises(DamagedFileError):
        file.keep("large", shape, dtype, lambda array: None, [(2, 3)])


def test_truncation_under_a_reader_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write(path)
    file = PackedFile(path)
    shape, dtype = ARRAYS["large"]
    array = file.keep("large", shape, dtype, lambda array: None)
    os.utime(path, ns=(1, path.stat().st_mtime_ns))  # as another engine marks its use
    assert file.trouble() == ""
    os.truncate(path, 4096)
    assert not array.any()
    assert f"{path} was truncated while it was in use" in file.trouble()


def test_overwriting_under_a_reader_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write(path)
    file = PackedFile(path)
    file.keep("large", *ARRAYS["large"], lambda array: None)
    os.utime(path, ns=(1, 1))
    assert file.trouble() == ""  # only touched
    with path.open("r+b") as other:
        other.seek(path.stat().st_size // 2)
        other.write(b"other")
    os.utime(path, ns=(1, 2))
    assert f"{path} was written to while it was in use" in file.trouble()


@pytest.mark.parametrize("size", [0, 10, 4096, 3 << 20])
def test_truncation_before_use_is_damage(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights"
    write(path)
    file = PackedFile(path)
    os.truncate(path, size)
    with pytest.raises(DamagedFileError, match="checksum"):
        file.keep("odd", *ARRAYS["odd"], lambda array: None)


def test_swapped_pieces_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write(path)
    content = path.read_bytes()
    for length in (8, 64, 1024, 4096, 1 << 20):
        begin = 2 << 20
        first, second = content[begin : begin + length], content[begin + length : begin + 2 * length]
        (tmp_path / "damaged").write_bytes(content[:begin] + second + first + content[begin + 2 * length :])
        with pytest.raises(DamagedFileError):
            read_all(tmp_path / "damaged")


def test_failed_write_leaves_no_thread(tmp_path: Path) -> None:
    layout = Layout()
    layout.keep("large", *ARRAYS["large"], lambda array: None)
    with (tmp_path / "weights").open("w+b") as file, (tmp_path / "weights").open("rb") as read_only:
        writer = FileWriter(file.fileno(), layout, {})
        os.dup2(read_only.fileno(), file.fileno())
        writer.keep("large", *ARRAYS["large"], lambda array: fill_with("large", array))
        with pytest.raises(OSError, match="Bad file descriptor"):
            writer.finish()
        writer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("packed-weights")]

"""The model of the processor's tiles, which `amxemulated` runs on, against the manual's formulas."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.native_program import build_program
from tests.ops import tiles

SIZES = [(16, 16, 16), (1, 16, 16), (5, 7, 3), (16, 1, 16), (13, 16, 1)]  # rows, steps, columns


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-ffp-contract=off", "-Wno-psabi", "-mavx2", "-mfma"]
    return build_program(tmp_path_factory.mktemp("tiles"), "tests/ops/native/tile_model.cpp", flags=flags)


def header(kind: int, rows: int, a_rows: int, steps: int, columns: int) -> bytes:
    return np.array([kind, rows, a_rows, steps, columns], np.int32).tobytes()


def results(program: Path, tmp_path: Path, kind: int, cases: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[bytes]:
    """Return the sums of each case's (sums, A, B)."""
    file, content, places = tmp_path / "cases", b"", []
    for sums, a, b in cases:
        content += header(kind, len(sums), len(a), len(b), sums.shape[1])
        places.append(len(content))
        content += sums.tobytes() + a.tobytes() + b.tobytes()
    file.write_bytes(content)
    printed = subprocess.run([program, file], check=True, capture_output=True, text=True, timeout=100).stdout
    assert printed == f"{len(cases)} cases\n"
    found = file.read_bytes()
    return [found[place : place + sums.nbytes] for place, (sums, _, _) in zip(places, cases, strict=True)]


def bfloat16_cases() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield numbers of one size; of very different ones, so that most are lost in the sum; around the least normal number,
    where smaller ones are 0 before and after each operation; and so large that sums become infinite or NaN."""
    generator = np.random.default_rng(1)
    cases = []
    for rows, steps, columns in SIZES:
        for spread, least in ((0, 0), (30, 0), (3, -64), (2, -130), (4, 62)):

            def draw(*shape: int, low: int = least, wide: int = spread) -> np.ndarray:
                exponents = generator.integers(low - wide, low + wide + 1, shape)
                return (generator.standard_normal(shape) * 2.0**exponents).astype(np.float32)

            a, b = (draw(*shape).view(np.uint32) >> 16 for shape in ((rows, steps, 2), (steps, columns, 2)))
            cases.append((draw(rows, columns), a.astype(np.uint16), b.astype(np.uint16)))
    return cases


def test_products_of_bfloat16(program: Path, tmp_path: Path) -> None:
    cases = bfloat16_cases()
    for (sums, a, b), found in zip(cases, results(program, tmp_path, 0, cases), strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = tiles.dot_bfloat16(sums, tiles.widened(a), tiles.widened(b))
        np.testing.assert_array_equal(np.frombuffer(found, np.float32).reshape(sums.shape), expected)


def test_products_of_bytes(program: Path, tmp_path: Path) -> None:
    """All bytes, sums that wrap around, and the largest everywhere."""
    generator = np.random.default_rng(1)
    cases = []
    for rows, steps, columns in SIZES:
        a, b = (generator.integers(-128, 128, shape).astype(np.int8) for shape in ((rows, steps, 4), (steps, columns, 4)))
        cases.append((generator.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32), a, b))
        cases.append((np.zeros((rows, columns), np.int32), np.full_like(a, -128), np.full_like(b, -128)))
    for (sums, a, b), found in zip(cases, results(program, tmp_path, 1, cases), strict=True):
        np.testing.assert_array_equal(np.frombuffer(found, np.int32).reshape(sums.shape), tiles.dot_int8(sums, a, b))


@pytest.mark.parametrize("size", [(3, 4, 5, 6), (17, 17, 4, 4), (4, 4, 17, 4), (4, 4, 4, 17)], ids=str)
def test_invalid_tiles_end_the_program(program: Path, tmp_path: Path, size: tuple[int, int, int, int]) -> None:
    """Tiles with rows that do not match, and sizes beyond a tile."""
    rows, a_rows, steps, columns = size
    file = tmp_path / "case"
    file.write_bytes(header(0, *size) + bytes(4 * (rows * columns + a_rows * steps + steps * columns)))
    assert subprocess.run([program, file], timeout=100).returncode == -signal.SIGILL

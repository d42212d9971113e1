"""Positions of patches, compared with plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from workers.extensions.media.geometry import Angles, patches_of, pixels_of, stretched


@pytest.mark.parametrize(("height", "width", "merge"), [(2, 2, 2), (6, 4, 2), (4, 22, 2), (9, 6, 3), (3, 2, 1)])
def test_patches_of_a_square_are_adjacent(height: int, width: int, merge: int) -> None:
    found = patches_of(height, width, merge)
    expected = [
        (row * merge + inner_row, column * merge + inner_column)
        for row in range(height // merge)
        for column in range(width // merge)
        for inner_row in range(merge)
        for inner_column in range(merge)
    ]
    assert list(zip(found.rows.tolist(), found.columns.tolist(), strict=True)) == expected
    assert found.window_lengths.tolist() == [height * width]
    assert found.tokens.tolist() == list(range(height * width // merge**2))


@pytest.mark.parametrize(
    ("height", "width", "merge", "window"), [(16, 16, 2, 4), (10, 14, 2, 4), (2, 2, 2, 4), (4, 22, 2, 4), (18, 6, 3, 2)]
)
def test_windows_are_ordered_by_row(height: int, width: int, merge: int, window: int) -> None:
    """Windows row after row, each with its squares row after row; the rest at the edges is a smaller window."""
    found = patches_of(height, width, merge, window)
    rows, columns = height // merge, width // merge
    tokens, lengths = [], []
    for top in range(0, rows, window):
        for left in range(0, columns, window):
            inside = [
                row * columns + column
                for row in range(top, min(top + window, rows))
                for column in range(left, min(left + window, columns))
            ]
            tokens += inside
            lengths.append(len(inside) * merge**2)
    assert found.tokens.tolist() == tokens
    assert found.window_lengths.tolist() == lengths
    squares = found.rows[:: merge**2] // merge * columns + found.columns[:: merge**2] // merge
    assert squares.tolist() == tokens


@pytest.mark.parametrize("has_aligned_corners", [True, False])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 6), (7, 7), (13, 2)])
def test_positions_are_interpolated(height: int, width: int, has_aligned_corners: bool) -> None:
    side = 7
    table = np.random.default_rng(0).standard_normal((side * side, 5), np.float32)
    patches = patches_of(height, width, 1)
    found = stretched(table, side, patches, height, width, has_aligned_corners)

    def place(index: int, count: int) -> float:
        if has_aligned_corners:
            return index * (side - 1) / max(count - 1, 1)
        return (index + 0.5) * side / count - 0.5

    def at(row: float, column: float) -> np.ndarray:
        values: np.ndarray = table[min(max(int(row), 0), side - 1) * side + min(max(int(column), 0), side - 1)]
        return values

    for index, (row, column) in enumerate(zip(patches.rows.tolist(), patches.columns.tolist(), strict=True)):
        y, x = place(row, height), place(column, width)
        top, left = np.floor(y), np.floor(x)
        expected = sum(
            (1 - abs(y - top - down)) * (1 - abs(x - left - right)) * at(top + down, left + right)
            for down in (0, 1)
            for right in (0, 1)
        )
        np.testing.assert_allclose(found[index], expected, atol=1e-5)


def test_pixels_are_cut_into_patches() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 9, 3), np.uint8)
    patches = patches_of(2, 3, 1)
    found = pixels_of(frames, patches, 3)
    assert found.dtype == np.float32
    for index, (row, column) in enumerate(zip(patches.rows.tolist(), patches.columns.tolist(), strict=True)):
        square = frames[:, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        np.testing.assert_array_equal(found[index], square.ravel())


def test_angles_depend_on_row_and_column() -> None:
    cosines, sines = Angles(8, 100.0, 50).of(np.array([0, 7]), np.array([0, 30]))
    np.testing.assert_array_equal(cosines[0], np.ones(8))
    np.testing.assert_array_equal(sines[0], np.zeros(8))
    angles = np.array([7, 7 / 10, 30, 30 / 10])
    np.testing.assert_allclose(cosines[1], np.tile(np.cos(angles), 2), atol=1e-5)
    np.testing.assert_allclose(sines[1], np.concatenate([-np.sin(angles), np.sin(angles)]), atol=1e-5)

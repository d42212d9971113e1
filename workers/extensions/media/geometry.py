"""Geometry of a unit's patches: their order, their segments, their rotary angles, their learned positions. Pure numpy.

Used by `encoder_inputs.py` for each call. Patches of a picture are ordered by merged square, and by row within each, so that
the patches of a token are adjacent rows. Encoders with windows order the squares by window.
"""

from __future__ import annotations

import msgspec
import numpy as np


class Patches(msgspec.Struct, frozen=True):
    """One grid of patches [height, width], in computing order."""

    rows: np.ndarray  # of each patch, int64
    columns: np.ndarray
    window_lengths: np.ndarray  # patches per window; a single window if there are none
    tokens: np.ndarray  # index of each merged square in row order

    def part(self, piece: slice) -> Patches:
        """Return some of the patches, with their places."""
        return msgspec.structs.replace(self, rows=self.rows[piece], columns=self.columns[piece])


def patches_of(height: int, width: int, merge: int, window: int = 0) -> Patches:
    """Return patches of a grid. `window`: merged squares on a side of a window, 0: no windows. Windows at the right and the
    bottom may be smaller."""
    rows, columns = height // merge, width // merge
    tokens = np.arange(rows * columns)
    lengths = np.array([height * width])
    if window:
        token_rows, token_columns = np.divmod(tokens, columns)
        windows = token_rows // window * -(-columns // window) + token_columns // window
        tokens = np.argsort(windows, kind="stable")
        lengths = np.bincount(windows) * merge * merge
    token_rows, token_columns = np.divmod(tokens, columns)
    inner_rows, inner_columns = np.divmod(np.arange(merge * merge), merge)
    return Patches(
        (token_rows[:, None] * merge + inner_rows).ravel(),
        (token_columns[:, None] * merge + inner_columns).ravel(),
        lengths,
        tokens,
    )


class Angles:
    """Rotary angles of row and column: a quarter of a head's pairs each; the numbers of a pair are half a head apart. Computed
    once per number, so that a patch's angles do not depend on its neighbours."""

    def __init__(
        self, head_dim: int, theta: float, num_places: int, *, is_alternating: bool = False, are_halves: bool = False
    ) -> None:
        """`theta` 0: no rotation. `is_alternating`: as `VisionConfig.has_alternating_frequencies`; `are_halves`: as
        `VisionConfig.rotates_halves`."""
        self._head_dim, self._are_halves = head_dim, are_halves
        half = head_dim // 2
        frequencies = 1.0 / np.float32(theta or 1.0) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        if not theta:
            frequencies[:] = 0
        shares = frequencies * np.float32(theta ** (-1 / half)) if is_alternating else frequencies
        numbers = np.arange(num_places, dtype=np.float32)[:, None]
        of_rows, of_columns = ((numbers * each).astype(np.float64) for each in (frequencies, shares))
        self._cosines = [np.cos(angles).astype(np.float32) for angles in (of_rows, of_columns)]
        self._sines = [np.sin(angles).astype(np.float32) for angles in (of_rows, of_columns)]

    def of(self, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and signed sines [n, head_dim], as `ops.modules.Rotary` has them."""
        if self._are_halves:
            (of_columns, of_rows), (lifts, falls) = (
                (table[1][columns], table[0][rows]) for table in (self._cosines, self._sines)
            )
            cosines = np.concatenate([of_columns, of_columns, of_rows, of_rows], axis=1)
            return cosines, np.concatenate([-lifts, lifts, -falls, falls], axis=1)
        cosines = np.concatenate([self._cosines[0][rows], self._cosines[1][columns]], axis=1)
        sines = np.concatenate([self._sines[0][rows], self._sines[1][columns]], axis=1)
        half = self._head_dim // 2  # without a rotation a head may have an odd number of pairs
        cosines, sines = cosines[:, :half], sines[:, :half]
        return np.concatenate([cosines, cosines], axis=1), np.concatenate([-sines, sines], axis=1)


def partners_of(head_dim: int, *, are_halves: bool = False) -> np.ndarray:
    """Return the other number of each one's pair."""
    parts = np.arange(head_dim, dtype=np.int32).reshape(2 if are_halves else 1, 2, -1)
    return parts[:, ::-1].ravel()


def added_positions(tables: np.ndarray, patches: Patches) -> np.ndarray:
    """Return for each patch the sum of the learned rows of its column and of its row: `tables` [2, places, n]."""
    found: np.ndarray = tables[0][patches.columns] + tables[1][patches.rows]
    return found


def stretched(table: np.ndarray, side: int, patches: Patches, height: int, width: int, has_aligned_corners: bool) -> np.ndarray:
    """Return for each patch the interpolation of a square of learned rows [side * side, n] between the four neighbours of its
    place."""
    low_rows, row_shares = _places(patches.rows, height, side, has_aligned_corners)
    low_columns, column_shares = _places(patches.columns, width, side, has_aligned_corners)
    found = np.zeros((len(patches.rows), table.shape[1]), np.float32)
    for row in (0, 1):
        for column in (0, 1):
            ids = np.clip(low_rows + row, 0, side - 1) * side + np.clip(low_columns + column, 0, side - 1)
            shares = (row_shares if row else 1 - row_shares) * (column_shares if column else 1 - column_shares)
            found += table[ids] * shares[:, None]
    return found


def _places(indexes: np.ndarray, count: int, side: int, has_aligned_corners: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each of `count` patches in a row of `side`: the index at or before it, and the fraction to the
    next."""
    numbers = indexes.astype(np.float32)
    if has_aligned_corners:
        places = numbers * np.float32(side - 1) / np.float32(max(count - 1, 1))
    else:
        places = (numbers + np.float32(0.5)) * np.float32(side) / np.float32(count) - np.float32(0.5)
    low = np.floor(places)
    return low.astype(np.int64), places - low


def pixels_of(frames: np.ndarray, patches: Patches, patch_size: int) -> np.ndarray:
    """Frames uint8 [f, H, W, 3] -> float32 [patches, f * patch * patch * 3]: each patch's pixels in all frames."""
    count, height, width, _ = frames.shape
    grid = frames.reshape(count, height // patch_size, patch_size, width // patch_size, patch_size * 3).transpose(1, 3, 0, 2, 4)
    pixels: np.ndarray = grid[patches.rows, patches.columns].reshape(len(patches.rows), -1).astype(np.float32)
    return pixels

"""Sizes of the pieces in which a matrix is packed. A piece fits in a cache, where it is read, packed, hashed and written. Used
by the packing of the native table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from ops import _cpu
from ops.weight_format import Source, SourceByRows

_BYTES = 1 << 20  # per thread, at two bytes per value


def cut(source: Source, num_rows: int, num_columns: int, unit: int) -> list[tuple[int, Source]]:
    """Return the source as pieces (number of rows, source) of whole units, except for the last; a matrix that must be decoded
    stays whole. A tensor that begins at a unit begins a new piece."""
    if not isinstance(source, SourceByRows):
        return [(num_rows, source)]
    most = max(_BYTES * _cpu.num_threads() // (2 * num_columns * unit), 1) * unit
    starts = [0, *(start for start in source.starts if start and start % unit == 0), num_rows]
    pieces = [piece for begin, end in pairwise(starts) for piece in _pieces(begin, end, most)]
    return [(end - begin, partial(source.read, begin, end)) for begin, end in pieces]


def _pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, most):
        yield first, min(first + most, end)

"""Chosen rows of a stored tensor, or its columns in another order, in any format."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.tensor import Kept, Tensor

Rows = slice | np.ndarray  # or their numbers, int [n]


def rows_of(tensor: Tensor, rows: Rows) -> DecodedTensor:
    """Return some rows of a matrix or a bias."""
    count = len(range(*rows.indices(tensor.shape[0]))) if isinstance(rows, slice) else len(rows)
    shape = (count, *tensor.shape[1:])
    if not isinstance(tensor, DecodedTensor):
        integers = partial(no_integers, shape)
        return DecodedTensor(
            shape, lambda: tensor.read()[rows], lambda: tensor.read_plain()[rows], lambda: None, integers, tensor.is_float
        )

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        found = tensor.read_integers(format)
        offsets = None if found.offsets is None else np.ascontiguousarray(found.offsets[rows])
        values, scales = (np.ascontiguousarray(each[rows]) for each in (found.values, found.scales))
        return QuantizedWeight(found.format, values, scales, offsets)

    return replace(
        tensor,
        shape=shape,
        read=lambda: tensor.read()[rows],
        read_plain=lambda: tensor.read_plain()[rows],
        read_integers=read_integers,
        read_columns=None,
        read_rows=None,
    )


def column_groups_of(tensor: DecodedTensor, order: np.ndarray, width: int) -> DecodedTensor:
    """Return a matrix whose groups of `width` columns are in another order. Integers are kept if columns that share a scale are
    in the same group."""
    columns = (order[:, None] * width + np.arange(width)).ravel()

    def kept() -> Kept:
        format = tensor.kept()
        if isinstance(format, WeightFormat) and (format.group_size == 0 or width % format.group_size):
            return f"groups of {width} columns are reordered, and {format.group_size or 'all'} columns share a scale"
        return format

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        found = tensor.read_integers(format)
        runs = columns[:: found.format.group_size] // found.format.group_size
        values, scales = np.take(found.values, columns, 1), np.take(found.scales, runs, 1)
        return QuantizedWeight(found.format, values, scales, None if found.offsets is None else np.take(found.offsets, runs, 1))

    return replace(
        tensor,
        read=lambda: np.take(tensor.read(), columns, 1),
        read_plain=lambda: np.take(tensor.read_plain(), columns, 1),
        kept=kept,
        read_integers=read_integers,
        read_columns=None,
        read_rows=None,
    )


def no_integers(shape: tuple[int, ...], format: WeightFormat) -> QuantizedWeight:
    """Stand in for `read_integers` of a tensor of floats."""
    raise AssertionError(f"a float tensor {shape} cannot be kept as {format}")

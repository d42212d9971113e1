"""Weights [out, in] of 4 or 8 bits with a scale per tensor, output, group of inputs, or rectangle: FP8 as stored by DeepSeek
and Qwen, and compressed-tensors (packed integers, integers, floats).

    packed  weight_packed int32 [out, in * bits / 32] from the lowest bits, 2^(bits - 1) added; weight_shape int64 [2];
            weight_zero_point int32 packed along the outputs, or int8
    int     weight int8 [out, in]; weight_zero_point int8
    float   weight float8 e4m3 [out, in]; scales may be powers of two (E8M0, or bytes without a type)

weight = (q - zero) * scale, with `weight_scale` (or its synonym `weight_scale_inv`) of shape [rows, columns] of rectangles.
With act-order, weight_g_idx has the group of each input.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.float8 import e4m3
from workers.weights.formats.integers import in_format
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.packing import unpacked
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import FLOATS, SCALES, StoredTensor

_Read = Callable[[], np.ndarray]


def packed_weight(module: QuantizedModule) -> DecodedTensor:
    per_word = 32 // module.scheme.num_bits
    words = module.matrix("weight_packed", ("I32",))
    dense = module.shape or module.tensor("weight_shape", ("I64", "I32"), (2,)).read_stored()
    num_outputs, num_inputs = (int(size) for size in dense)
    if words.shape != (num_outputs, -(-num_inputs // per_word)):
        raise module.error(
            f"weight_packed has shape {list(words.shape)}, which does not fit a weight {[num_outputs, num_inputs]}"
        )
    middle = 1 << (module.scheme.num_bits - 1)

    def read() -> np.ndarray:
        values: np.ndarray = read_unsigned().astype(np.float32) - np.float32(middle)
        return values

    def read_unsigned() -> np.ndarray:
        return unpacked(words.read_stored(), module.scheme.num_bits)[:, :num_inputs]

    def read_kept() -> np.ndarray:
        values = read_unsigned()
        return values if middle == 8 else (values ^ np.uint8(middle)).view(np.int8)

    return _scaled(module, (num_outputs, num_inputs), read, read_kept)


def int_weight(module: QuantizedModule) -> DecodedTensor:
    weight = module.matrix("weight", ("I8",))
    return _scaled(module, weight.shape, lambda: weight.read_stored().astype(np.float32), weight.read_stored)


def float_weight(module: QuantizedModule) -> DecodedTensor:
    weight = module.matrix("weight", ("F8_E4M3",))
    return _scaled(module, weight.shape, lambda: e4m3(weight.read_stored()))


def _scaled(
    module: QuantizedModule, shape: tuple[int, ...], read_values: _Read, read_kept: _Read | None = None
) -> DecodedTensor:
    """Return the decoded weight of a module. `read_kept` reads `QuantizedWeight.values`; None: the values are not integers."""
    height, width = module.scheme.block[0] or shape[0], module.scheme.block[1] or shape[1]
    grid = (-(-shape[0] // height), -(-shape[1] // width))
    name = "weight_scale_inv" if "weight_scale_inv" in module.tensors else "weight_scale"
    scales = module.tensor(name, FLOATS if read_kept else SCALES, *_grid_shapes(grid)).as_scales
    read_zeros = _zero_points(module, grid) if module.scheme.has_zero_points else None
    group_index = module.group_index("weight_g_idx", shape[1])
    rows = np.arange(shape[0]) // height

    def read() -> np.ndarray:
        columns = group_index()
        values = read_values()
        if read_zeros:
            values -= _spread(read_zeros(), rows, columns)
        values *= _spread(scales.read().reshape(grid), rows, columns)
        return values

    def kept() -> Kept:
        if read_kept is None:
            return "8-bit floats"
        return module.kept(shape[1], read_zeros is not None and bool(read_zeros().any()), group_index())

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        assert read_kept is not None, "8-bit floats are not integers"
        factors = scales.read().reshape(grid)[rows]
        kind = "int4" if module.scheme.num_bits == 4 else "int8"
        offsets = None
        if read_zeros and format.has_offsets:
            offsets = (read_zeros()[rows] + np.float32(8 if kind == "int4" else 0)) * factors
        stored = WeightFormat(kind, module.scheme.block[1], offsets is not None)  # type: ignore[arg-type]
        return in_format(QuantizedWeight(stored, read_kept(), factors, offsets), format)

    return DecodedTensor(shape, read, read, kept, read_integers)


def _grid_shapes(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes in which a grid may be stored: without dimensions of 1 if that loses nothing."""
    shapes: list[tuple[int, ...]] = [grid]
    if grid[1] == 1:
        shapes.append((grid[0],))
    if grid == (1, 1):
        shapes.append(())
    return shapes


def _spread(grid: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return each rectangle's value at each of its elements, or an array that broadcasts to it."""
    if grid.shape[0] > 1:
        grid = grid[rows]
    return grid[:, columns] if grid.shape[1] > 1 else grid


def _zero_points(module: QuantizedModule, grid: tuple[int, int]) -> _Read:
    """Return a reader of the zero points as float32, in the range of the values."""
    packed_shape = (-(-grid[0] * module.scheme.num_bits // 32), grid[1])
    tensor = module.tensor("weight_zero_point", ("I8", "I32"))
    if module.scheme.storage == "packed" and tensor.dtype == "I32":
        module.tensor("weight_zero_point", ("I32",), packed_shape)
        return lambda: _unpacked_zeros(tensor, module.scheme.num_bits, grid)
    module.tensor("weight_zero_point", ("I8",), *_grid_shapes(grid))
    return lambda: tensor.read_stored().astype(np.float32).reshape(grid)


def _unpacked_zeros(tensor: StoredTensor, num_bits: int, grid: tuple[int, int]) -> np.ndarray:
    points: np.ndarray = unpacked(tensor.read_stored().T, num_bits)[:, : grid[0]].T.astype(np.float32)
    points -= np.float32(1 << (num_bits - 1))
    return points

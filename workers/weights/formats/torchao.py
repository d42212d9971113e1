"""torchao as transformers stores it in safetensors files: integers of 1 to 8 bits, and 8-bit floats, with scales of groups.

    Int8Tensor, IntxUnpackedToInt8Tensor  _weight_qdata int8 [out, in]: (q - zero) * scale
    Float8Tensor                          _weight_qdata float8 e4m3 or e5m2 [out, in]: q * scale
    MXTensor, NVFP4Tensor                 `torchao_blocks.py`
    Int4Tensor                            _weight_qdata int8 [out, in / 2], the first of two in the low half: q * scale + zero
    _weight_scale, _weight_zero_point     [rows, columns] of rectangles of `block_size`, the last ones perhaps smaller;
                                          Int4Tensor: [groups, out]
    _weight_act_pre_scale                 [in], multiplies inputs (AWQ and SmoothQuant of torchao): folded into the weight

The metadata of the file has the kind of each tensor. Other kinds have layouts of one device, or are prototypes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.float8 import e4m3, e5m2
from workers.weights.formats.integers import in_format, kept_format
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.tensor import Kept
from workers.weights.formats.torchao_blocks import blocks_weight
from workers.weights.safetensors import FLOATS

_PLAIN = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
_BLOCKS = ("MXTensor", "NVFP4Tensor")
_SUPPORTED = (*_PLAIN, "Int4Tensor", *_BLOCKS)
_DTYPES = {"Float8Tensor": ("F8_E4M3", "F8_E5M2"), "Int4Tensor": ("I8", "U8")}
_FOUR_BITS = ("int1", "int2", "int3", "int4")


def torchao_weight(module: QuantizedModule) -> DecodedTensor:
    kind, attributes = _description(module)
    if kind in _BLOCKS:
        return blocks_weight(module, kind, attributes)
    is_packed = kind == "Int4Tensor"
    stored = module.matrix("_weight_qdata", _DTYPES.get(kind, ("I8",)))
    shape = (stored.shape[0], stored.shape[1] * (2 if is_packed else 1))
    scales = module.matrix("_weight_scale", FLOATS) if kind != "Float8Tensor" else module.tensor("_weight_scale", FLOATS)
    grid = (scales.shape[::-1] if is_packed else scales.shape) or (1, 1)
    height, width = _rectangle(module, attributes, shape, grid)
    zeros = None
    if kind != "Float8Tensor" and (is_packed or "_weight_zero_point" in module.tensors):
        zeros = module.tensor("_weight_zero_point", ("I8", *FLOATS), scales.shape)
    before = None
    if "_weight_act_pre_scale" in module.tensors:
        before = module.tensor("_weight_act_pre_scale", FLOATS, (shape[1],), (1, shape[1]), ())
    target = attributes.get("target_dtype")
    is_narrow = is_packed or (isinstance(target, dict) and target.get("_data") in _FOUR_BITS)
    middle = np.float32(8 if is_narrow else 0)

    def read_grids() -> tuple[np.ndarray, np.ndarray]:
        """Return scales and zero points, [rows, columns] of rectangles."""
        points = np.zeros(scales.shape, np.float32) if zeros is None else zeros.read()
        found = (scales.read(), points)
        return (found[0].T, found[1].T) if is_packed else (found[0].reshape(grid), found[1].reshape(grid))

    def read_signed() -> np.ndarray:
        values = stored.read_stored()
        if not is_packed:
            return values
        low = values.view(np.int8) << 4
        return np.stack([low >> 4, values.view(np.int8) >> 4], axis=-1).reshape(shape)

    def read() -> np.ndarray:
        rows, columns = np.arange(shape[0])[:, None] // height, np.arange(shape[1]) // width
        factors, points = (each[rows, columns] for each in read_grids())
        codes = read_signed()
        if kind == "Float8Tensor":
            values: np.ndarray = (e5m2 if stored.dtype == "F8_E5M2" else e4m3)(codes)
        else:
            values = codes.astype(np.float32)
        values = values * factors + points if is_packed else (values - points) * factors
        return values if before is None else values * before.read().reshape(-1)

    def kept() -> Kept:
        if kind == "Float8Tensor" or before is not None:
            return "8-bit floats" if before is None else "scaled inputs"
        has_offsets = bool(read_grids()[1].any())
        if shape[0] % height or shape[1] % width:
            return "groups of several sizes"
        group = 0 if grid[1] == 1 else width
        return kept_format(4 if is_narrow else 8, group, shape[1], has_offsets) or f"groups of {width}"

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        factors, points = (np.repeat(each, height, 0) for each in read_grids())
        values = (read_signed() + np.int8(8)).view(np.uint8) if is_narrow else read_signed()
        if is_narrow and (values > 15).any():
            raise module.error("_weight_qdata has values outside of 4 bits")
        offsets = None
        if format.has_offsets:
            offsets = middle * factors - points if is_packed else (points + middle) * factors
        own = WeightFormat("int4" if is_narrow else "int8", width, format.has_offsets)
        return in_format(QuantizedWeight(own, values, factors, offsets), format)

    return DecodedTensor(shape, read, read, kept, read_integers)


def _rectangle(
    module: QuantizedModule, attributes: dict[str, Any], shape: tuple[int, int], grid: tuple[int, ...]
) -> tuple[int, int]:
    """Return the size of the rectangles that share a scale: outputs and inputs."""
    error = module.error(f"_weight_scale has shape {list(grid)}, which does not fit a weight {list(shape)}")
    if len(grid) != 2 or 0 in grid or 0 in shape:
        raise error
    block = attributes.get("block_size")
    if not isinstance(block, list) or len(block) < 2:  # the size follows if all are equal
        if shape[0] % grid[0] or shape[1] % grid[1]:
            raise error
        return shape[0] // grid[0], shape[1] // grid[1]
    sizes = [size if each == -1 else each for size, each in zip(shape, block[-2:], strict=True)]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise module.error(f"block_size {str(block)[:80]} should be positive integers")
    expected = tuple(-(-whole // size) for whole, size in zip(shape, sizes, strict=True))
    if expected != grid:
        raise module.error(
            f"_weight_scale has {list(grid)} scales, expected {list(expected)} for block_size {str(block)[:80]} of a weight "
            f"{list(shape)}"
        )
    return min(sizes[0], shape[0]), min(sizes[1], shape[1])


def _description(module: QuantizedModule) -> tuple[str, dict[str, Any]]:
    """Return the kind of the weight and its attributes, from the file's metadata."""
    text = module.metadata.get(f"{module.name}.weight", "")
    try:
        found = json.loads(text)
        kind, attributes = str(found["_type"]), dict(found["_data"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise module.error(
            "the file's metadata does not describe its weight; save the model again with transformers"
        ) from error
    if kind not in _SUPPORTED:
        raise module.error(
            f"{kind} is not supported, because its layout is for one device or a prototype; supported are "
            f"{', '.join(_SUPPORTED)}; use the unquantized model with --quantization wint4 or wint8"
        )
    return kind, attributes

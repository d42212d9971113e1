"""HQQ (Badri and Shaji 2023) as its library stores it in safetensors files: 1 to 8 bits, groups of values with a float zero.

W_q     uint8 or int32 [rows, columns]: the weight [out, in], cut into groups, which are rows (axis 1) or columns (axis 0);
        a word holds values that are a fixed number of rows apart, the first in the highest bits
scale, zero   floats [groups, 1] or [1, groups]: weight = (q - zero) * scale
nbits, group_size, axis, shape, packing, ...   integers, and text as bytes
"""

from __future__ import annotations

import math

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.integers import in_format, kept_format
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import FLOATS

_PACKINGS = {"8bit_u8": (np.uint8, (0,)), "4bit_u8": (np.uint8, (4, 0)), "2bit_u8": (np.uint8, (6, 4, 2, 0))}
_PACKINGS |= {"1bit_u8": (np.uint8, tuple(range(7, -1, -1))), "3bit_32": (np.uint32, tuple(range(27, -1, -3)))}
_MASKS = {"8bit_u8": 255, "4bit_u8": 15, "2bit_u8": 3, "1bit_u8": 1, "3bit_32": 7}


def hqq_weight(module: QuantizedModule) -> DecodedTensor:
    packing, axis = _text(module, "packing"), _number(module, "axis")
    shape = tuple(int(size) for size in module.tensor("shape", ("I64", "I32"), (2,)).read_stored())
    if packing not in _PACKINGS or axis not in (0, 1) or min(shape) < 1:
        raise module.error(f"packing {packing!r}, axis {axis} and shape {list(shape)} are not supported")
    for name in ("quant_scale", "quant_zero"):
        if name in module.tensors and _number(module, name):
            raise module.error(f"{name} is set, but quantized scales and zero points are not supported; quantize without them")
    dtype, places = _PACKINGS[packing]
    words = module.tensor("W_q", ("U8", "I32", *FLOATS))
    scales, zeros = (module.tensor(name, FLOATS) for name in ("scale", "zero"))
    num_groups = math.prod(scales.shape)
    size = math.prod(shape) // max(num_groups, 1)
    grouped = (num_groups, size) if axis else (size, num_groups)
    if num_groups * size != math.prod(shape) or scales.shape != ((num_groups, 1) if axis else (1, num_groups)):
        raise module.error(f"scale has shape {list(scales.shape)}, which does not fit a weight {list(shape)}")
    if zeros.shape not in (scales.shape, ()):
        raise module.error(f"zero has shape {list(zeros.shape)}, expected {list(scales.shape)}")
    num_rows = -(-grouped[0] // len(places))
    if words.num_bytes != num_rows * grouped[1] * dtype().itemsize:
        raise module.error(f"W_q has {words.num_bytes} bytes, which does not fit {packing} and a weight {list(shape)}")
    is_narrow = packing != "8bit_u8"

    def read_codes() -> np.ndarray:
        """Return uint8 [rows, columns] of the cut weight."""
        packed = np.ascontiguousarray(words.read_stored()).reshape(-1).view(dtype).reshape(num_rows, grouped[1])
        mask = dtype(_MASKS[packing])
        found = np.concatenate([(packed >> dtype(place) & mask).astype(np.uint8) for place in places])
        return found[: grouped[0]]

    def read() -> np.ndarray:
        values: np.ndarray = read_codes().astype(np.float32)
        values -= zeros.read()
        values *= scales.read()
        return values.reshape(shape)

    def kept() -> Kept:
        if not axis or shape[1] % size:
            return "groups across outputs"
        return kept_format(4 if is_narrow else 8, size, shape[1], True) or f"groups of {size}"

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        codes, factors = read_codes().reshape(shape), scales.read().reshape(shape[0], -1)
        points = np.broadcast_to(zeros.read(), scales.shape).reshape(factors.shape)
        values = codes if is_narrow else (codes ^ np.uint8(128)).view(np.int8)
        offsets = (points - np.float32(0 if is_narrow else 128)) * factors
        own = WeightFormat("int4" if is_narrow else "int8", size, True)
        return in_format(QuantizedWeight(own, values, factors, offsets), format)

    return DecodedTensor(shape, read, read, kept, read_integers)


def _number(module: QuantizedModule, suffix: str) -> int:
    return int(module.tensor(suffix, ("I32", "I64", "U8"), (), (1,)).read_stored().reshape(-1)[0])


def _text(module: QuantizedModule, suffix: str) -> str:
    return bytes(module.tensor(suffix, ("U8",)).read_stored().reshape(-1)[:32]).decode("ascii", "replace")

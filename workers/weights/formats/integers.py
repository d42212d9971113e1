"""Integers as the kernels keep them (`ops/weight_format.py`): groups of inputs split to supported sizes, and one format for the
parts of one matrix. Nothing is rounded here: results represent the same numbers.

Used by the formats beside this file and by the loader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat

GROUP_SIZES = (128, 64, 32, 16)  # supported by kernels; also 0, all inputs, for 8 bits
_ZERO = 8  # represents 0 in 4 bits without offsets


def kept_format(num_bits: int, group_size: int, num_inputs: int, has_offsets: bool) -> WeightFormat | None:
    """Return the format for stored groups of `group_size` inputs (0: all); None if no supported size divides them."""
    fitting = [size for size in GROUP_SIZES if num_inputs % size == 0 and (group_size or num_inputs) % size == 0]
    is_whole = group_size in (0, num_inputs)
    if num_bits == 8 and is_whole:
        return WeightFormat("int8", 0, has_offsets)
    if fitting:
        return WeightFormat("int4" if num_bits == 4 else "int8", fitting[0], has_offsets)
    return WeightFormat("int8", 0, has_offsets) if is_whole else None


def common_format(formats: Sequence[WeightFormat]) -> WeightFormat | None:
    """Return the narrowest format that represents each of `formats` exactly; None if floats of 4 bits are among others."""
    if len(set(formats)) == 1:
        return formats[0]
    if any(format.kind == "float4" for format in formats):
        return None
    kind = "int8" if any(format.kind == "int8" for format in formats) else "int4"
    sizes = [format.group_size for format in formats if format.group_size]
    has_offsets = {format.has_offsets for format in formats}
    scales = {format.scales for format in formats}  # a new offset is 8 scales, which may be too large for a half
    narrow = scales.pop() if len(scales) == len(has_offsets) == 1 else "float32"
    return WeightFormat(kind, min(sizes, default=0), any(has_offsets), scales=narrow)  # type: ignore[arg-type]


def in_format(weight: QuantizedWeight, format: WeightFormat) -> QuantizedWeight:
    """Convert `weight` to a format that represents it exactly (see `common_format`). Its scales may belong to groups of any
    size."""
    if weight.format == format:
        return weight
    num_inputs = weight.values.shape[1]
    values, scales, offsets = weight.values, weight.scales, weight.offsets
    if format.has_offsets and offsets is None:
        offsets = scales * np.float32(_ZERO if weight.format.kind == "int4" else 0)
    if weight.format.kind == "int4" and format.kind == "int8":
        values = values.astype(np.int8)
        if not format.has_offsets:
            values -= np.int8(_ZERO)
    starts = np.arange(0, num_inputs, format.group_size or num_inputs)
    groups = starts // (weight.format.group_size or num_inputs)
    if len(groups) != scales.shape[1]:
        scales = scales[:, groups]
        offsets = None if offsets is None else offsets[:, groups]
    return QuantizedWeight(format, values, scales, offsets)


def side_by_side(parts: Sequence[QuantizedWeight], format: WeightFormat) -> QuantizedWeight:
    """Join matrices with the same inputs along the outputs."""
    found = [in_format(part, format) for part in parts]
    if len(found) == 1:
        return found[0]
    offsets = [part.offsets for part in found if part.offsets is not None]
    return QuantizedWeight(
        format,
        np.concatenate([part.values for part in found]),
        np.concatenate([part.scales for part in found]),
        np.concatenate(offsets) if offsets else None,
    )

"""bitsandbytes as transformers stores it: NF4 and FP4 (Dettmers et al. 2023), and LLM.int8() (Dettmers et al. 2022).

    weight uint8 [n / 2, 1]: codes of all values of [out, in] in order, the first of two in the high half
    weight.quant_map float32 [16]    weight.absmax float32 [n / 64], or uint8 with weight.nested_absmax and nested_quant_map
    weight.quant_state.bitsandbytes__nf4 uint8: JSON with the shape and the sizes of blocks

    weight int8 [out, in]    SCB float32 [out]: weight = q * SCB / 127

value = quant_map[code] * absmax. The kernels have no table of 16 floats, so they keep values of 4 bits in 8, rounded to a 127th
of the largest in a block.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.integers import in_format, kept_format
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.tensor import Kept

_STATE = "weight.quant_state.bitsandbytes__"
_MOST = 127  # of signed bytes


def blocks_weight(module: QuantizedModule) -> DecodedTensor:
    """Return a weight of 4 bits."""
    state = _state(module)
    shape, block = tuple(state["shape"]), state["blocksize"]
    num_values = shape[0] * shape[1]
    if num_values % block:
        raise module.error(f"{num_values} values are not whole blocks of {block}")
    packed = module.tensor("weight", ("U8",), (num_values // 2, 1))
    levels = module.tensor("weight.quant_map", ("F32",), (16,))
    largest = module.tensor("weight.absmax", ("F32", "U8"), (num_values // block,))
    nested = largest.dtype == "U8"
    nested_size = state.get("nested_blocksize", 0)
    if nested and (type(nested_size) is not int or nested_size < 1):
        raise module.error(f"nested_blocksize is {nested_size!r}, expected a positive integer")
    if nested:
        outer = module.tensor("weight.nested_absmax", ("F32",), (-(-largest.shape[0] // nested_size),))
        inner = module.tensor("weight.nested_quant_map", ("F32",), (256,))

    def read_largest() -> np.ndarray:
        stored = largest.read_stored()
        if not nested:
            return stored
        values: np.ndarray = inner.read()[stored] * outer.read()[np.arange(len(stored)) // nested_size]
        values += np.float32(state.get("nested_offset", 0.0))
        return values

    def read_codes() -> np.ndarray:
        stored = packed.read_stored().reshape(-1)
        return np.stack([stored >> 4, stored & 15], axis=-1).reshape(-1, block)

    def read() -> np.ndarray:
        values: np.ndarray = levels.read()[read_codes()] * read_largest()[:, None]
        return values.reshape(shape)

    def kept() -> Kept:
        if shape[1] % block:
            return f"blocks of {block} across outputs"
        return kept_format(8, block, shape[1], False) or f"groups of {block}"

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        table = levels.read()
        top = np.abs(table).max()
        integers = np.round(table * (np.float32(_MOST) / top)).astype(np.int8)[read_codes()].reshape(shape)
        scales = (read_largest() * (top / np.float32(_MOST))).reshape(shape[0], -1)
        return in_format(QuantizedWeight(WeightFormat("int8", block), integers, scales), format)

    return DecodedTensor(shape, read, read, kept, read_integers)


def _state(module: QuantizedModule) -> dict[str, Any]:
    """Return the JSON object with shape and block sizes, checked."""
    suffix = next((name for name in module.tensors if name.startswith(_STATE)), f"{_STATE}nf4")
    stored = module.tensor(suffix, ("U8",)).read_stored()
    try:
        state = json.loads(stored.tobytes())
        sizes = [*state["shape"], state["blocksize"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise module.error(f"{suffix} cannot be read: {error!r}") from error
    if len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes):
        raise module.error(f"{suffix} has shape {state['shape']} and blocks of {state['blocksize']}; expected positive sizes")
    if not isinstance(state.get("nested_offset", 0.0), int | float):
        raise module.error(f"{suffix} has nested_offset {state['nested_offset']!r}, expected a number")
    return dict(state)


def bytes_weight(module: QuantizedModule) -> DecodedTensor:
    """Return a weight of 8 bits."""
    weight = module.matrix("weight", ("I8",))
    largest = module.tensor("SCB", ("F32", "F16", "BF16"), (weight.shape[0],), (weight.shape[0], 1))

    def read_scales() -> np.ndarray:
        scales: np.ndarray = largest.read().reshape(-1, 1) / np.float32(_MOST)
        return scales

    def read() -> np.ndarray:
        values: np.ndarray = weight.read_stored() * read_scales()
        return values

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        return in_format(QuantizedWeight(WeightFormat("int8"), weight.read_stored(), read_scales()), format)

    return DecodedTensor(weight.shape, read, read, lambda: WeightFormat("int8"), read_integers)

"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits, groups of inputs with a scale and a zero
point.

    qweight int32 [in * bits / 32, out]    scales float16 [groups, out]
    qzeros int32 [groups, out * bits / 32]    g_idx int32 [in]

A word holds neighbouring inputs (qweight) or outputs (qzeros) from its lowest bits. weight = (q - zero) * scale. Version 1
stores zero - 1, which wraps around. With act-order, g_idx has the group of each input.
"""

from __future__ import annotations

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.integers import in_format
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.packing import unpacked
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import FLOATS

_ZERO = 8  # represents 0 in 4 bits without offsets


def gptq_weight(module: QuantizedModule) -> DecodedTensor:
    scheme = module.scheme
    num_bits, middle = scheme.num_bits, 1 << (scheme.num_bits - 1)
    words = module.matrix("qweight", ("I32",))
    if 32 * words.shape[0] % num_bits or num_bits * words.shape[1] % 32:
        raise module.error(f"qweight has shape {list(words.shape)}, which is not whole words of {num_bits} bits")
    num_inputs, num_outputs = 32 * words.shape[0] // num_bits, words.shape[1]
    num_groups = -(-num_inputs // (scheme.block[1] or num_inputs))
    scales = module.tensor("scales", FLOATS, (num_groups, num_outputs))
    has_zeros = scheme.has_zero_points or "qzeros" in module.tensors
    zeros = module.tensor("qzeros", ("I32",), (num_groups, num_outputs * num_bits // 32)) if has_zeros else None
    group_index = module.group_index("g_idx", num_inputs)

    def read_zeros() -> np.ndarray:
        """Return [out, groups]."""
        if zeros is None:
            return np.full(scales.shape[::-1], middle, np.float32)
        stored = unpacked(zeros.read_stored(), scheme.num_bits)
        points: np.ndarray = (stored + np.uint8(scheme.zero_offset)) & np.uint8((1 << scheme.num_bits) - 1)
        outputs_first: np.ndarray = points.astype(np.float32).T
        return outputs_first

    def read() -> np.ndarray:
        group = group_index()
        values = unpacked(words.read_stored().T, scheme.num_bits).astype(np.float32)
        values -= read_zeros()[:, group]
        values *= scales.read().T[:, group]
        return values

    def kept() -> Kept:
        return module.kept(num_inputs, bool((read_zeros() != middle).any()), group_index())

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        values, factors = unpacked(words.read_stored().T, scheme.num_bits), np.ascontiguousarray(scales.read().T)
        is_wide = num_bits == 8  # signed bytes
        offsets = (read_zeros() - np.float32(middle if is_wide else 0)) * factors if format.has_offsets else None
        stored = WeightFormat("int8" if is_wide else "int4", scheme.block[1], offsets is not None)
        if is_wide:
            values = (values ^ np.uint8(middle)).view(np.int8)
        elif offsets is None:
            values = values + np.uint8(_ZERO - middle)
        return in_format(QuantizedWeight(stored, values, factors, offsets), format)

    return DecodedTensor((num_outputs, num_inputs), read, read, kept, read_integers)

"""AWQ (Lin et al. 2023), the "gemm" layout of AutoAWQ: 4 bits, groups of inputs with a scale and a zero point.

    qweight int32 [in, out / 8]    scales float16 [groups, out]    qzeros int32 [groups, out / 8]

A word holds 8 neighbouring outputs in the order 0 2 4 6 1 3 5 7 from its lowest bits. weight = (q - zero) * scale.
"""

from __future__ import annotations

import numpy as np

from workers.formats.module import DequantizedTensor, QuantizedModule
from workers.formats.packing import unpacked
from workers.safetensors import FLOATS

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of each output within its word
_SYMMETRIC_ZERO = 8


def awq_weight(module: QuantizedModule) -> DequantizedTensor:
    words = module.matrix("qweight", ("I32",))
    num_inputs, num_words = words.shape
    group_size = module.scheme.block[1] or num_inputs
    num_groups = -(-num_inputs // group_size)
    scales = module.tensor("scales", FLOATS, (num_groups, num_words * 8))
    has_zeros = module.scheme.has_zero_points or "qzeros" in module.tensors
    zeros = module.tensor("qzeros", ("I32",), (num_groups, num_words)) if has_zeros else None

    def read() -> np.ndarray:
        group = np.arange(num_inputs) // group_size
        values = _in_order(words.read_stored()).astype(np.float32)
        values -= _in_order(zeros.read_stored()).astype(np.float32)[group] if zeros else np.float32(_SYMMETRIC_ZERO)
        values *= scales.read()[group]
        return values.T

    return DequantizedTensor((num_words * 8, num_inputs), read)


def _in_order(words: np.ndarray) -> np.ndarray:
    values = unpacked(words, 4)
    return values.reshape(*words.shape, 8)[..., _PLACES].reshape(values.shape)

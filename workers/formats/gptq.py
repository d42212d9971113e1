"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it: 4 or 8 bits, groups of inputs with a scale and a zero point.

    qweight int32 [in * bits / 32, out]    scales float16 [groups, out]
    qzeros int32 [groups, out * bits / 32]    g_idx int32 [in]

A word holds neighbouring inputs (qweight) or outputs (qzeros) from its lowest bits. weight = (q - zero) * scale. Version 1
stores zero - 1, which wraps around. With act-order, g_idx says the group of each input.
"""

from __future__ import annotations

import numpy as np

from workers.formats.module import DequantizedTensor, QuantizedModule
from workers.formats.packing import unpacked
from workers.safetensors import FLOATS


def gptq_weight(module: QuantizedModule) -> DequantizedTensor:
    scheme = module.scheme
    per_word = 32 // scheme.num_bits
    words = module.matrix("qweight", ("I32",))
    num_inputs, num_outputs = words.shape[0] * per_word, words.shape[1]
    num_groups = -(-num_inputs // (scheme.block[1] or num_inputs))
    scales = module.tensor("scales", FLOATS, (num_groups, num_outputs))
    has_zeros = scheme.has_zero_points or "qzeros" in module.tensors
    zeros = module.tensor("qzeros", ("I32",), (num_groups, num_outputs // per_word)) if has_zeros else None
    group_index = module.group_index("g_idx", num_inputs)

    def read() -> np.ndarray:
        group = group_index()
        values = unpacked(words.read_stored().T, scheme.num_bits).astype(np.float32)
        if zeros is None:
            values -= np.float32(1 << (scheme.num_bits - 1))
        else:
            stored = unpacked(zeros.read_stored(), scheme.num_bits)
            points = (stored + np.uint8(scheme.zero_offset)) & np.uint8((1 << scheme.num_bits) - 1)
            values -= points.astype(np.float32).T[:, group]
        values *= scales.read().T[:, group]
        return values

    return DequantizedTensor((num_outputs, num_inputs), read)

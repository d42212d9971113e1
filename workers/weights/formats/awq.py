"""AWQ (Lin et al. 2023), the "gemm" layout of AutoAWQ: 4 bits, groups of inputs with a scale and a zero point.

    qweight int32 [in, out / 8]    scales float16 [groups, out]    qzeros int32 [groups, out / 8]

A word holds 8 neighbouring outputs in the order 0 2 4 6 1 3 5 7 from its lowest bits. weight = (q - zero) * scale.
"""

from __future__ import annotations

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.integers import in_format
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.packing import unpacked
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import FLOATS

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of each output within its word
_SYMMETRIC_ZERO = 8


def awq_weight(module: QuantizedModule) -> DecodedTensor:
    words = module.matrix("qweight", ("I32",))
    num_inputs, num_words = words.shape
    group_size = module.scheme.block[1] or num_inputs
    num_groups = -(-num_inputs // group_size)
    scales = module.tensor("scales", FLOATS, (num_groups, num_words * 8))
    has_zeros = module.scheme.has_zero_points or "qzeros" in module.tensors
    zeros = module.tensor("qzeros", ("I32",), (num_groups, num_words)) if has_zeros else None

    def read_zeros() -> np.ndarray:
        """Return [groups, out]."""
        stored = _in_order(zeros.read_stored()) if zeros else np.full(scales.shape, _SYMMETRIC_ZERO)
        return stored.astype(np.float32)

    def read() -> np.ndarray:
        group = np.arange(num_inputs) // group_size
        values: np.ndarray = _in_order(words.read_stored()).astype(np.float32)
        values -= read_zeros()[group]
        values *= scales.read()[group]
        outputs_first: np.ndarray = values.T
        return outputs_first

    def kept() -> Kept:
        has_offsets = bool((read_zeros() != _SYMMETRIC_ZERO).any())
        return module.kept(num_inputs, has_offsets, np.arange(num_inputs) // group_size)

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        values, factors = np.ascontiguousarray(_in_order(words.read_stored()).T), np.ascontiguousarray(scales.read().T)
        offsets = read_zeros().T * factors if format.has_offsets else None
        stored = WeightFormat("int4", group_size, offsets is not None)
        return in_format(QuantizedWeight(stored, values, factors, offsets), format)

    return DecodedTensor((num_words * 8, num_inputs), read, read, kept, read_integers)


def _in_order(words: np.ndarray) -> np.ndarray:
    values = unpacked(words, 4)
    return values.reshape(*words.shape, 8)[..., _PLACES].reshape(values.shape)

"""Values of 4 bits (E2M1) with a scale for a group of inputs: NVFP4 of NVIDIA's Model Optimizer and of compressed-tensors, and
MXFP4 of compressed-tensors.

    weight_packed (Model Optimizer: weight) uint8 [out, in / 2]: two codes, the first in the low half
    weight_scale float8 e4m3 [out, in / 16], or uint8 [out, in / 32]: exponents of MXFP4
    NVFP4: weight_global_scale float32 [1], which divides scales (Model Optimizer: weight_scale_2, which multiplies them)
"""

from __future__ import annotations

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat, float32
from workers.weights.formats.float8 import e4m3
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.mxfp4 import MXFP4, NAN, codes_of, scales_of


def float4_weight(module: QuantizedModule) -> DecodedTensor:
    is_mx = module.scheme.storage == "mxfp4"
    group_size = module.scheme.block[1]
    packed = module.matrix("weight_packed" if "weight_packed" in module.tensors else "weight", ("U8",))
    shape = (packed.shape[0], 2 * packed.shape[1])
    if shape[1] % group_size:
        raise module.error(f"{shape[1]} inputs are not whole groups of {group_size}")
    scales = module.tensor("weight_scale", ("U8", "F8_E8M0") if is_mx else ("F8_E4M3",), (shape[0], shape[1] // group_size))
    divides = "weight_global_scale" in module.tensors
    suffix = "weight_global_scale" if divides else "weight_scale_2"
    common = None if is_mx else module.tensor(suffix, ("F32",), (1,), ())

    def read_scales() -> np.ndarray:
        """Return the scales of doubled values."""
        if common is None:
            exponents = scales.read_stored()
            return np.where(exponents == NAN, np.float32(np.nan), scales_of(exponents))
        factor = common.read().reshape(-1)[0]
        if np.isinf(factor):
            raise module.error(f"{suffix} is {factor}, expected a number; the checkpoint is damaged; write it again")
        values: np.ndarray = e4m3(scales.read_stored())
        values = values / factor if divides else values * factor
        values *= np.float32(0.5)
        return values

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        codes = codes_of(packed.read_stored()).reshape(shape)
        return QuantizedWeight(format, codes, read_scales())

    kept = MXFP4 if is_mx else WeightFormat("float4", group_size)
    return DecodedTensor(
        shape, lambda: float32(read_integers(kept)), lambda: float32(read_integers(kept)), lambda: kept, read_integers
    )

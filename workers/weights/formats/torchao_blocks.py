"""torchao's microscaled weights: blocks of inputs with a scale each. Called by `torchao.py`.

    MXTensor     _weight_qdata uint8 [out, in / 2]: two codes of 4 bits (E2M1), the first in the low half, or
                 float8 e4m3 or e5m2 [out, in]; _weight_scale float8 e8m0 [out, in / block]
    NVFP4Tensor  _weight_qdata as with 4 bits; _weight_scale float8 e4m3 [out, in / 16]; perhaps _weight_per_tensor_scale
                 float32, which multiplies scales

With `is_swizzled_scales`, scales are in tiles of 128 rows and 4 columns, each [32, 4, 4]: the row within a quarter of the
tile, the quarter, the column. Incomplete tiles are padded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat, float32
from workers.weights.formats.float8 import e4m3, e5m2
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.mxfp4 import MXFP4, NAN, codes_of, scales_of
from workers.weights.safetensors import StoredTensor

_TILE_ROWS, _TILE_COLUMNS, _QUARTER = 128, 4, 32
_BITS_8 = {"float8_e4m3fn": ("F8_E4M3", e4m3), "float8_e5m2": ("F8_E5M2", e5m2)}
_BITS_4 = "float4_e2m1fn_x2"
_MAX_BLOCK = 1 << 16


def blocks_weight(module: QuantizedModule, kind: str, attributes: dict[str, Any]) -> DecodedTensor:
    is_mx = kind == "MXTensor"
    found = attributes.get("elem_dtype") if is_mx else _BITS_4
    element = found.get("_data") if isinstance(found, dict) else found
    if element != _BITS_4 and element not in _BITS_8:
        supported = ", ".join((_BITS_4, *_BITS_8))
        raise module.error(f"elem_dtype {str(element)[:80]!r} of {kind} is not supported; supported are {supported}")
    block = attributes.get("block_size", 32 if is_mx else 16)
    if type(block) is not int or not 0 < block <= _MAX_BLOCK or block % 2:
        raise module.error(f"block_size {str(block)[:80]} should be an even number up to {_MAX_BLOCK}")
    stored = module.matrix("_weight_qdata", ("U8",) if element == _BITS_4 else (_BITS_8[element][0],))
    shape = (stored.shape[0], stored.shape[1] * (2 if element == _BITS_4 else 1))
    if shape[1] % block:
        raise module.error(f"{shape[1]} inputs are not whole blocks of {block}")
    grid = (shape[0], shape[1] // block)
    scales = _Scales(module, is_mx, grid, bool(attributes.get("is_swizzled_scales")))
    if element != _BITS_4:
        decode = _BITS_8[element][1]

        def read_floats() -> np.ndarray:
            values: np.ndarray = decode(stored.read_stored()).reshape(*grid, block) * (2 * scales.read())[:, :, None]
            return values.reshape(shape)

        return DecodedTensor(shape, read_floats, read_floats, lambda: "8-bit floats", _no_integers)
    kept = MXFP4 if is_mx and block == MXFP4.group_size else WeightFormat("float4", block)

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        return QuantizedWeight(format, codes_of(stored.read_stored()).reshape(shape), scales.read())

    def read() -> np.ndarray:
        return float32(read_integers(kept))

    is_kept = block == (MXFP4.group_size if is_mx else 16)
    return DecodedTensor(shape, read, read, lambda: kept if is_kept else f"groups of {block}", read_integers)


class _Scales:
    """Scales of `grid` [out, blocks]."""

    def __init__(self, module: QuantizedModule, is_mx: bool, grid: tuple[int, int], is_swizzled: bool) -> None:
        self._is_mx, self._grid, self._is_swizzled = is_mx, grid, is_swizzled
        self._tiles = (-(-grid[0] // _TILE_ROWS), -(-grid[1] // _TILE_COLUMNS))
        stored = grid
        if is_swizzled:
            stored = (self._tiles[0] * _QUARTER, self._tiles[1] * _TILE_COLUMNS * _TILE_ROWS // _QUARTER)
        self._stored = module.tensor("_weight_scale", ("F8_E8M0", "U8") if is_mx else ("F8_E4M3",), stored)
        self._common: StoredTensor | None = None
        if not is_mx and "_weight_per_tensor_scale" in module.tensors:
            self._common = module.tensor("_weight_per_tensor_scale", ("F32",), (), (1,), (1, 1))

    def read(self) -> np.ndarray:
        """Return the scales of doubled values."""
        codes = self._stored.read_stored()
        if self._is_swizzled:
            tiles = codes.reshape(*self._tiles, _QUARTER, _TILE_ROWS // _QUARTER, _TILE_COLUMNS).transpose(0, 3, 2, 1, 4)
            whole = tiles.reshape(self._tiles[0] * _TILE_ROWS, self._tiles[1] * _TILE_COLUMNS)
            codes = np.ascontiguousarray(whole[: self._grid[0], : self._grid[1]])
        if self._is_mx:
            return np.where(codes == NAN, np.float32(np.nan), scales_of(codes))
        values: np.ndarray = e4m3(codes) * np.float32(0.5)
        return values if self._common is None else values * self._common.read().reshape(-1)[0]


def _no_integers(format: WeightFormat) -> QuantizedWeight:
    raise AssertionError("8-bit floats are not integers")

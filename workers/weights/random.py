"""Random weights (--load-format dummy): values that depend only on the seed and the tensor's name. Used by the loader."""

from __future__ import annotations

import zlib

import numpy as np

from ops.weight_format import QuantizedWeight, WeightFormat, bfloat16_bits
from workers.weights.declaration import Weights
from workers.weights.formats.tensor import Kept

_SCALE = np.float32(0.02)
_BLOCK = 1 << 20  # numbers generated at a time


class RandomWeights:
    """Random values with the interface of a checkpoint. With `is_narrow` matrices are bfloat16."""

    has_offset_norms = False

    def __init__(self, weights: Weights, seed: int, is_narrow: bool) -> None:
        self._shapes = weights.shapes()
        self._norms = {f"{norm.name}.weight" for norm in weights.norms}
        self._norms |= {f"{norm.name}.weight" for norm in weights.layer_norms}
        self._norms |= {f"{name}.weight" for norm in weights.head_norms for name in (norm.query_name, norm.key_name)}
        self._norms |= {f"{factor.name}.weight" for factor in weights.factors}
        self._norms |= {f"{norm.name}.weight" for norm in weights.gated_norms}
        self._norms |= {router.scales_name for router in weights.routers}
        self._seed = seed
        self._is_narrow = is_narrow

    def read_plain(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        if not shape:  # a limit
            return np.array(-np.inf if name.endswith("_min") else np.inf, np.float32)
        if name in self._norms:
            return np.ones(shape, np.float32)
        values = np.empty(shape, np.uint16 if self._is_narrow and len(shape) == 2 else np.float32)
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        flat = values.reshape(-1)
        for begin in range(0, len(flat), _BLOCK):
            block = flat[begin : begin + _BLOCK]
            drawn = generator.standard_normal(len(block), np.float32) * _SCALE
            if block.dtype == np.uint16:
                bfloat16_bits(drawn, block)
            else:
                block[:] = drawn
        return values

    def read_columns(self, name: str, columns: slice) -> np.ndarray:
        return self.read_plain(name)[:, columns]

    def has_rows(self, name: str, is_whole: bool = True) -> bool:
        return False

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        raise AssertionError(f"{name} has no rows")

    def kept(self, name: str) -> Kept:
        return None

    def read_integers(self, name: str, format: WeightFormat) -> QuantizedWeight:
        raise AssertionError(f"{name} is random, not {format}")

    def release(self) -> None:
        """Do nothing: no memory is held."""

    def check_unchanged(self) -> None:
        """Do nothing: there are no files."""

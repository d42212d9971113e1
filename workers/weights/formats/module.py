"""Linear module of a quantized checkpoint: its stored tensors, and its decoded weight.

Used by the formats beside this file. Shapes are checked when a module is created, values are read on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.checkpoint.quantization_config import WeightScheme
from engine.errors import CheckpointError
from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.integers import kept_format
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import StoredTensor


@dataclass(frozen=True, slots=True)
class DecodedTensor:
    """Weight [out, in] that is decoded each time it is read (see `Tensor`)."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    read_plain: Callable[[], np.ndarray]
    kept: Callable[[], Kept]
    read_integers: Callable[[WeightFormat], QuantizedWeight]
    is_float: bool = True
    read_columns: Callable[[slice], np.ndarray] | None = None  # decodes only some columns; None: it decodes all
    read_rows: Callable[[int, int], np.ndarray] | None = None  # the same of rows


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """`tensors` by their suffix after the module's name: qweight, scales, ..."""

    name: str
    scheme: WeightScheme
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the files
    shape: tuple[int, int] | None = None  # of the weight, if it is not stored

    def error(self, text: str) -> CheckpointError:
        bits = f", {self.scheme.num_bits} bits" if self.scheme.num_bits else ""
        return CheckpointError(f"{self.name} ({self.scheme.storage}{bits}): {text}")

    def tensor(self, suffix: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> StoredTensor:
        """Return the stored tensor, which must have one of `dtypes` and one of `shapes`, if any are given."""
        tensor = self.tensors.get(suffix)
        if tensor is None:
            raise self.error(f"{suffix} is missing; the checkpoint has {', '.join(sorted(self.tensors))}")
        if tensor.dtype not in dtypes:
            raise self.error(f"{suffix} has dtype {tensor.dtype}, expected {' or '.join(dtypes)}")
        if shapes and tensor.shape not in shapes:
            expected = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
            raise self.error(f"{suffix} has shape {list(tensor.shape)}, expected {expected}")
        return tensor

    def matrix(self, suffix: str, dtypes: Sequence[str]) -> StoredTensor:
        tensor = self.tensor(suffix, dtypes)
        if len(tensor.shape) != 2:
            raise self.error(f"{suffix} has shape {list(tensor.shape)}, expected two dimensions")
        return tensor

    def kept(self, num_inputs: int, has_offsets: bool, group_index: np.ndarray) -> Kept:
        """Return the format for integers in groups of inputs; `group_index` returns the group of each input."""
        size = self.scheme.block[1] or num_inputs
        if (group_index != np.arange(num_inputs) // size).any():
            return "groups are not in the order of the inputs"
        return kept_format(max(self.scheme.num_bits, 4), size, num_inputs, has_offsets) or f"groups of {size}"

    def group_index(self, suffix: str, num_inputs: int) -> Callable[[], np.ndarray]:
        """Return a reader of the group of each input: from the tensor `suffix` if groups are reordered, else consecutive."""
        size = self.scheme.block[1] or num_inputs
        if not self.scheme.is_reordered:
            return lambda: np.arange(num_inputs) // size
        tensor = self.tensor(suffix, ("I32", "I64"), (num_inputs,))
        num_groups = -(-num_inputs // size)

        def read() -> np.ndarray:
            index = tensor.read_stored()
            if index.size and not 0 <= index.min() <= index.max() < num_groups:
                raise self.error(f"{suffix} has groups from {index.min()} to {index.max()}, expected 0 to {num_groups - 1}")
            return index

        return read

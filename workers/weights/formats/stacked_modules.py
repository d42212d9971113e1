"""Experts of a layer as one quantized tensor for all, which is a quantized matrix [out, in] for each.

    compressed-tensors  gate_up_proj_packed, _scale, _zero_point [experts, ...]
    torchao             _gate_up_proj_qdata, _scale, _zero_point [experts, ...]

Called by `quantized.py`; `workers/weights/stacked.py` finds the matrices in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from engine.checkpoint.quantization_config import QuantizationConfig
from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.rows import rows_of
from workers.weights.formats.tensor import Kept
from workers.weights.safetensors import StoredTensor

_NAMES = {
    "packed": re.compile(r"(?P<prefix>.+\.experts)\.(?P<part>gate_up_proj|down_proj)_(?P<suffix>packed|scale|zero_point)"),
    "torchao": re.compile(
        r"(?P<prefix>.+\.experts)\._(?P<part>gate_up_proj|down_proj)_(?P<suffix>qdata|scale|zero_point|act_pre_scale|per_tensor_scale)"
    ),
}
_PREFIXES = {"packed": "weight_", "torchao": "_weight_"}
Decode = Callable[[QuantizedModule], DecodedTensor]


class StackedModules(msgspec.Struct, frozen=True):
    """Matrices of all experts, decoded one by one."""

    experts: tuple[DecodedTensor, ...]
    is_float: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    def read(self) -> np.ndarray:
        return np.stack([expert.read() for expert in self.experts])

    read_plain = read

    def kept(self) -> Kept:
        return "several matrices"

    def read_integers(self, format: WeightFormat) -> QuantizedWeight:
        raise AssertionError("matrices of experts are read one by one")

    def rows(self, expert: int, begin: int, end: int) -> DecodedTensor:
        """Return rows [begin, end) of the matrix of one expert."""
        return rows_of(self.experts[expert], slice(begin, end))


def stacked_modules(
    tensors: Mapping[str, StoredTensor], config: QuantizationConfig, metadata: Mapping[str, str], decode: Decode
) -> Iterator[tuple[str, StackedModules, set[str]]]:
    """Yield the name of each such tensor, its matrices, and the names of what it is stored as. Raises CheckpointError."""
    found: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        for storage, pattern in _NAMES.items():
            match = pattern.fullmatch(name)
            if match:
                found.setdefault((storage, f"{match['prefix']}.{match['part']}"), {})[match["suffix"]] = tensor
    for (storage, name), parts in found.items():
        main = parts.get("packed") or parts.get("qdata")
        scheme = config.scheme_of(name)
        if main is None or len(main.shape) != 3 or scheme is None or scheme.storage != storage:
            continue
        describing = {f"{name}.weight": metadata[name]} if name in metadata else {}
        experts = []
        for index in range(main.shape[0]):
            own = {}
            for suffix, part in parts.items():
                if len(part.shape) != 3 or part.shape[0] != main.shape[0]:
                    raise QuantizedModule(name, scheme).error(
                        f"{part.name} has shape {list(part.shape)}, expected one matrix for each of {main.shape[0]} experts"
                    )
                own[f"{_PREFIXES[storage]}{suffix}"] = part.at(index)
            dense = (main.shape[1], main.shape[2] * 32 // scheme.num_bits) if storage == "packed" else None
            experts.append(decode(QuantizedModule(name, scheme, own, describing, dense)))
        if experts:
            yield name, StackedModules(tuple(experts)), {part.name for part in parts.values()}

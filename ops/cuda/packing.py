"""Weights of CUDA's ops: on the card, as `Weights` of operands.h and as arrays of float32 or of the table's type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ops.cpu.int_packing import rounded
from ops.cuda.array import CardMemory, CudaArray, array_on
from ops.cuda.operands import TYPES
from ops.modules import (
    ColumnRules,
    Columns,
    Embedding,
    Experts,
    Factor,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Linear,
    Module,
    Norm,
    PositionTable,
    Rotary,
    Router,
    Sinks,
)
from ops.weight_format import QuantizedWeight, Source, Store, Values, WeightFormat, bfloat16_bits, float32

INTEGERS = ("int8", "int4", "float4")  # kinds of weights
_STEP = 32  # inputs of a linear come in multiples of it


class PackedLinear(NamedTuple):
    """Weights of a rank's outputs."""

    values: CudaArray
    scales: CudaArray | None
    offsets: CudaArray | None
    type: str
    num_inputs: int
    padded_inputs: int
    num_outputs: int
    group_size: int

    def operands(self) -> dict[str, Any]:
        """Return `Weights` of operands.h."""
        return {**self._asdict(), "type": TYPES[self.type]}


class PackedExperts(NamedTuple):
    """Weights of all experts, one after another."""

    gate_up: PackedLinear
    down: PackedLinear
    gate_up_bias: CudaArray | None  # [experts, num_outputs]
    down_bias: CudaArray | None

    def arrays(self) -> tuple[()]:
        """Return no arrays: nothing has to be faulted in when an expert moves to a rank."""
        return ()


class _OnHost(NamedTuple):
    """A PackedLinear before it is copied to the card."""

    values: np.ndarray
    scales: np.ndarray | None
    offsets: np.ndarray | None
    type: str
    num_inputs: int
    group_size: int


class Packer:
    """Packs modules into the `memory` of a card. `dtype`: of activations, "float32" or "bfloat16"."""

    def __init__(self, memory: CardMemory, dtype: str) -> None:
        self._memory, self._dtype = memory, dtype

    def pack(self, module: Module, sources: Mapping[str, Source], store: Store) -> None:
        """Pack a module (`OpTable.pack`), without the store."""
        match module:
            case Linear():
                module.weight = self._linear([_packed(sources["weight"](), module, self._type_of(module.format))])
                module.bias = self._biases(module, sources)
            case HeadLinear():
                heads = module.weights_of_heads(float32(sources["weight"]()))
                module.weight = self._linear([_floats(heads[head], self._dtype) for head in module.heads])
            case Embedding() if module.tied is not None and not module.tied.columns:
                module.weight = module.tied.weight
            case Embedding():
                importances = None if module.tied is None else module.tied.importances
                values = _in_format(sources["weight"](), module.format, importances)
                module.weight = self._linear([_laid_out(values, (), self._dtype)])
            case Norm():
                module.weight = self._floats(sources["weight"]).reshape([-1])
            case LayerNorm():
                module.weight, module.bias = self._floats(sources["weight"]), self._floats(sources["bias"])
            case PositionTable():
                module.values = float32(sources["weight"]())
            case HeadNorm():  # all queries have the same weight, and so have all keys
                of_heads = [float32(sources[name]()).reshape(-1) for name in ("queries", "keys")]
                module.weight = array_on(self._memory, np.stack([*of_heads, np.ones_like(of_heads[0])]))
            case Rotary():
                module.cosines, module.sines = self._floats(sources["cosines"]), self._floats(sources["sines"])
                module.partners = array_on(self._memory, np.asarray(sources["partners"]()).astype(np.int32))
                if "query_factors" in sources:
                    module.query_factors = self._numbers(sources["query_factors"])
            case Router():
                module.linear.weight = self._linear([_packed(sources["weight"](), module.linear, "float32")])
                module.linear.bias = self._floats(sources["bias"]) if "bias" in sources else None
                if "correction" in sources:
                    module.correction = self._floats(sources["correction"]).reshape([-1])
                if "scales" in sources:
                    module.scales = self._floats(sources["scales"])
            case Experts():
                gate_up, down = (
                    self._linear([_packed(sources[f"{part}.{i}"](), linears[0], self._dtype) for i in range(len(linears))])
                    for part, linears in module.parts.items()
                )
                biases = (self._biases_of_experts(module, part, sources) for part in module.parts)
                module.weight = PackedExperts(gate_up, down, *biases)
            case Factor():
                module.weight = self._numbers(sources["weight"])
            case Sinks():
                module.weight = self._floats(sources["weight"])
            case ColumnRules():
                module.weight = self._floats(sources["rules"])

    def _type_of(self, format: WeightFormat) -> str:
        """Return the type of floats in this format."""
        return "float32" if format.kind == "float32" else self._dtype

    def _floats(self, source: Source) -> CudaArray:
        return array_on(self._memory, np.ascontiguousarray(float32(source())))

    def _numbers(self, source: Source) -> CudaArray:
        """Return them in the table's type."""
        values = np.ascontiguousarray(float32(source()))
        return array_on(self._memory, _bits(values) if self._dtype == "bfloat16" else values, self._dtype)

    def _biases(self, module: Linear, sources: Mapping[str, Source]) -> CudaArray | None:
        if "bias" not in sources:
            return None
        return array_on(self._memory, np.ascontiguousarray(_own(float32(sources["bias"]()), module.columns)))

    def _biases_of_experts(self, module: Experts, part: str, sources: Mapping[str, Source]) -> CudaArray | None:
        if not module.has_bias:
            return None
        linears = module.parts[part]
        biases = [_own(float32(sources[f"{part}.{i}.bias"]()), linears[0].columns) for i in range(len(linears))]
        return array_on(self._memory, np.stack(biases))

    def _linear(self, matrices: Sequence[_OnHost]) -> PackedLinear:
        """Copy matrices of one shape and format to the card, one after another."""
        first = matrices[0]

        def joined(arrays: list[Any]) -> CudaArray | None:
            return None if arrays[0] is None else array_on(self._memory, np.concatenate(arrays))

        bytes_ = np.concatenate([each.values.view(np.uint8).reshape(len(each.values), -1) for each in matrices])
        codes_in_byte = 2 if first.type in ("int4", "float4") else 1
        padded_inputs = first.values.shape[1] * codes_in_byte
        return PackedLinear(
            array_on(self._memory, bytes_),
            joined([each.scales for each in matrices]),
            joined([each.offsets for each in matrices]),
            first.type,
            first.num_inputs,
            padded_inputs,
            len(first.values),
            first.group_size,
        )


def _own(values: np.ndarray, columns: Columns) -> np.ndarray:
    return np.concatenate([values[begin:end] for begin, end in columns]) if columns else values


def _in_format(values: Values, format: WeightFormat, importances: np.ndarray | None) -> Values:
    """Round floats if the format has integers."""
    return rounded(values, format, importances) if isinstance(values, np.ndarray) and format.kind in INTEGERS else values


def _packed(values: Values, module: Linear, dtype: str) -> _OnHost:
    return _laid_out(_in_format(values, module.format, module.importances), module.columns, dtype)


def _laid_out(values: Values, columns: Columns, dtype: str) -> _OnHost:
    """Return these outputs (empty: all), with padded inputs. `dtype`: of floats."""
    if not isinstance(values, QuantizedWeight):
        return _floats(_own(values, columns), dtype)
    kind, integers = values.format.kind, _own(values.values, columns)
    num_inputs = integers.shape[1]
    group = values.format.group_size or -(-num_inputs // _STEP) * _STEP
    padded_inputs = -(-num_inputs // math.lcm(group, _STEP)) * math.lcm(group, _STEP)
    by_group = _own(values.scales, columns)
    if values.multipliers is not None:
        by_group = by_group * _own(values.multipliers, columns)
    missing = (0, 0), (0, padded_inputs // group - by_group.shape[1])
    scales = np.pad(by_group, missing).astype(np.float32)
    offsets = None if values.offsets is None else np.pad(_own(values.offsets, columns), missing).astype(np.float32)
    zero = 8 if kind == "int4" and offsets is None else 0
    padded = np.pad(integers, ((0, 0), (0, padded_inputs - num_inputs)), constant_values=zero)
    codes = (padded[:, ::2] | padded[:, 1::2] << 4).astype(np.uint8) if kind != "int8" else padded.astype(np.int8)
    return _OnHost(codes, scales, offsets, kind, num_inputs, group)


def _floats(values: Values, dtype: str) -> _OnHost:
    if dtype == "float32":
        numbers = float32(values)
    else:
        numbers = values if isinstance(values, np.ndarray) and values.dtype == np.uint16 else _bits(float32(values))
    padded = np.ascontiguousarray(np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % _STEP))))
    return _OnHost(padded, None, None, dtype, numbers.shape[1], _STEP)


def _bits(values: np.ndarray) -> np.ndarray:
    bits = np.empty(values.shape, np.uint16)
    bfloat16_bits(values, bits)
    return bits

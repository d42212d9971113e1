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
    Convolution,
    DeltaRule,
    Embedding,
    Experts,
    Factor,
    GatedNorm,
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
    StateSpaces,
)
from ops.weight_format import QuantizedWeight, Source, Store, Values, WeightFormat, bfloat16_bits, float32

INTEGERS = ("int8", "int4", "float4")  # kinds of weights
TILE_OUTPUTS = 32  # as in linear.h
_STEP = 32  # inputs of a linear come in multiples of it
_UNIT_OUTPUTS = {"int8": 16, "int4": 32, "float4": 32}  # as in weights.h; of floats 8
_FEWEST_BLOCKS = 128  # that a linear should have for a card of some hundred multiprocessors
_PARTS_OF_BLOCK, _MAX_PARTS, _FEWEST_STEPS = 8, 32, 4  # of a part


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
    num_parts: int
    arrivals: CudaArray | None = None  # int32, zeros, of blocks that share a tile of outputs; None: they share none

    def operands(self) -> dict[str, Any]:
        """Return `Weights` of operands.h."""
        values = {**self._asdict(), "type": TYPES[self.type]}
        del values["arrivals"]
        return values


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
    """Weights before they are packed."""

    values: np.ndarray  # [outputs, padded inputs]: numbers, or codes of integers
    scales: np.ndarray | None  # [outputs, groups]
    offsets: np.ndarray | None
    type: str
    num_inputs: int
    group_size: int


def num_parts(padded_inputs: int, num_outputs: int) -> int:
    """Return how many parts of the inputs a linear sums by themselves: enough that a small matrix has work for the whole card.
    It depends on the matrix alone, so a row has the same bits in any batch."""
    parts, blocks = _PARTS_OF_BLOCK, -(-num_outputs // TILE_OUTPUTS)
    while parts < _MAX_PARTS and blocks < _FEWEST_BLOCKS and padded_inputs // _STEP >= 2 * parts * _FEWEST_STEPS:
        parts, blocks = 2 * parts, 2 * blocks
    return parts


def in_units(values: np.ndarray, kind: str) -> np.ndarray:
    """Return weights in the order of weights.h, as bytes [padded outputs, bytes of an output].

    `values`: numbers or codes of 8 or 4 bits, [outputs, inputs]. Inputs are a multiple of 32; outputs are padded with zeros."""
    unit = _UNIT_OUTPUTS.get(kind, 8)
    padded = np.pad(values, ((0, -len(values) % unit), (0, 0)))
    inputs = padded.shape[1]
    blocks = padded.reshape(len(padded) // unit, unit // 8, 8, inputs // _STEP, 4, 8).transpose(0, 3, 2, 4, 1, 5)
    if kind == "int8":  # of four, the even ones first
        blocks = blocks.reshape(*blocks.shape[:-1], 2, 2, 2).swapaxes(-1, -2)
    elif kind in INTEGERS:
        codes = blocks.reshape(*blocks.shape[:-1], 4, 2).astype(np.uint8)  # number 2 i at place i, 2 i + 1 at place i + 4
        blocks = np.stack([codes[..., 0:4:2, half] | codes[..., 1:4:2, half] << 4 for half in (0, 1)], axis=-2)
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(len(padded), -1)


def scales_in_units(values: np.ndarray, kind: str) -> np.ndarray:
    """Return scales or offsets [outputs, groups] as float32, those of a unit's outputs side by side, with padded outputs."""
    unit = _UNIT_OUTPUTS[kind]
    padded = np.pad(values.astype(np.float32), ((0, -len(values) % unit), (0, 0)))
    blocks = padded.reshape(len(padded) // unit, unit, -1).swapaxes(1, 2)
    return np.ascontiguousarray(blocks).reshape(padded.shape)


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
            case Convolution():
                weight = float32(sources["weight"]()).reshape(module.channels, module.kernel).T
                module.weight = array_on(self._memory, np.ascontiguousarray(weight))
                module.bias = self._floats(sources["bias"]) if module.has_bias else None
            case DeltaRule() | StateSpaces():
                rates = -np.exp(float32(sources["A_log"]()).reshape(-1).astype(np.float64))
                module.weight = array_on(self._memory, rates.astype(np.float32))
                module.bias = self._floats(sources["dt_bias"])
                if isinstance(module, StateSpaces):
                    module.skips = self._floats(sources["D"])
            case GatedNorm():
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

        def scales(arrays: list[Any]) -> CudaArray | None:
            return joined([None if array is None else scales_in_units(array, first.type) for array in arrays])

        num_outputs, padded_inputs = first.values.shape
        values = joined([in_units(each.values, first.type) for each in matrices])
        assert values is not None
        parts = num_parts(padded_inputs, num_outputs) if len(matrices) == 1 else _PARTS_OF_BLOCK
        arrivals = np.zeros(num_outputs // TILE_OUTPUTS + 1, np.int32)
        return PackedLinear(
            values,
            scales([each.scales for each in matrices]),
            scales([each.offsets for each in matrices]),
            first.type,
            first.num_inputs,
            padded_inputs,
            num_outputs,
            first.group_size,
            parts,
            array_on(self._memory, arrivals) if parts > _PARTS_OF_BLOCK else None,
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
    return _OnHost(padded.astype(np.int8 if kind == "int8" else np.uint8), scales, offsets, kind, num_inputs, group)


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

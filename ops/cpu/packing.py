"""Weights of the native table: the layout of each module, and packing from a checkpoint.

The loader calls `pack` (an op of the table) once for each module. Packed weights go to the store, so that a weight cache holds
them in the layout of the kernels; a source is read only if the store lacks its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from ops import _cpu
from ops.cpu import int_packing
from ops.cpu.array import Array, array_of
from ops.cpu.cuts import cut
from ops.cpu.int_packing import KINDS, SCALE_DTYPES, IntPacking
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
from ops.weight_format import Source, Store, Values, float32

_FLOAT = np.dtype(np.float32)


def pack(module: Module, sources: Mapping[str, Source], store: Store) -> None:
    match module:
        case Linear():
            _pack_linear(module, sources, store)
        case HeadLinear():
            _pack_head_linear(module, sources["weight"], store)
        case Embedding():
            _pack_embedding(module, sources["weight"], store)
        case Norm():
            module.weight = _kept(module.name, sources["weight"], (module.width,), store)
        case Factor():
            module.weight = _kept(module.name, sources["weight"], (1,), store)
        case Sinks():
            module.weight = _kept(module.name, sources["weight"], (module.num_heads,), store)
        case ColumnRules():
            module.weight = _kept(module.name, sources["rules"], (4, module.width), store)
        case LayerNorm():
            module.weight = _kept(module.name, sources["weight"], (module.width,), store)
            module.bias = _kept(f"{module.name} bias", sources["bias"], (module.width,), store)
        case PositionTable():
            module.values = _kept(module.name, sources["weight"], module.shape, store).owner
        case HeadNorm():
            shape = (module.width,)
            module.weight = (
                _kept(module.query_name, sources["queries"], shape, store),
                _kept(module.key_name or f"{module.query_name}.keys", sources["keys"], shape, store),
                array_of(np.ones(shape, np.float32)) if module.has_values else None,
            )
        case Rotary():
            tables = [_float32(sources[name]) for name in ("cosines", "sines")]
            module.cosines, module.sines = (array_of(each[:1].copy() if module.is_constant else each) for each in tables)
            module.partners = array_of(np.ascontiguousarray(sources["partners"](), np.int32))
            if "query_factors" in sources:
                module.query_factors = array_of(_float32(sources["query_factors"]))
        case Router():
            _pack_linear(module.linear, sources, store)
            if module.correction_name:
                module.correction = _kept(
                    f"{module.linear.name}.correction", sources["correction"], (module.num_experts,), store
                )
            if module.scales_name:
                module.scales = _kept(module.scales_name, sources["scales"], (module.num_experts,), store)
        case Experts():
            _pack_experts(module, sources, store)
        case Convolution():
            _pack_convolution(module, sources, store)
        case DeltaRule() | StateSpaces():
            _pack_recurrence(module, sources, store)
        case GatedNorm():
            module.weight = _kept(module.name, sources["weight"], (module.weight_width,), store)


def layout() -> str:
    """Return the variant and a fingerprint of these files and the native module, so that packed weights of another build are
    never read."""
    native = Path(_cpu.__file__).stat()
    sources = "".join(Path(file).read_text() for file in (__file__, int_packing.__file__))
    return f"{_cpu.variant()} {native.st_size} {native.st_mtime_ns} {sources}"


def panels_of(columns: Columns) -> list[tuple[int, int]]:
    """Return the panels with these columns, each once."""
    panels: list[tuple[int, int]] = []
    for begin, end in columns:
        panels.append((max(begin // _cpu.PANEL, panels[-1][1] if panels else 0), -(-end // _cpu.PANEL)))
    return panels


def _float32(source: Source) -> np.ndarray:
    return np.ascontiguousarray(float32(source()))


def _kept(name: str, source: Source, shape: tuple[int, ...], store: Store) -> Array:
    """Keep the values as float32."""

    def fill(kept: np.ndarray) -> None:
        kept[...] = float32(source()).reshape(shape)

    return array_of(store.keep(name, shape, _FLOAT, fill))


def _pack_convolution(module: Convolution, sources: Mapping[str, Source], store: Store) -> None:
    """Keep the weights as [kernel, channels]."""

    def fill(kept: np.ndarray) -> None:
        kept[...] = float32(sources["weight"]()).reshape(module.channels, module.kernel).T

    module.weight = array_of(store.keep(f"{module.name}.weight", (module.kernel, module.channels), _FLOAT, fill))
    module.bias = _kept(f"{module.name}.bias", sources["bias"], (module.channels,), store) if module.has_bias else None


def _pack_recurrence(module: DeltaRule | StateSpaces, sources: Mapping[str, Source], store: Store) -> None:
    num_heads = module.num_value_heads if isinstance(module, DeltaRule) else module.num_heads
    num_biases = num_heads * (module.num_decays if isinstance(module, DeltaRule) else 1)

    def fill(kept: np.ndarray) -> None:
        kept[...] = -np.exp(float32(sources["A_log"]()).reshape(-1).astype(np.float64))

    module.weight = array_of(store.keep(module.names[0], (num_heads,), _FLOAT, fill))
    module.bias = _kept(module.names[1], sources["dt_bias"], (num_biases,), store)
    if isinstance(module, StateSpaces):
        module.skips = _kept(module.names[2], sources["D"], (num_heads,), store)


# ---------------------------------------------------------------------------------------------------------- matrices

WEIGHT_KINDS = ("float32", "bfloat16", "int8", "int4", "float4")  # as `WeightKind` in native/kernels.h
_DTYPES: dict[str, np.dtype] = {"float32": _FLOAT, "bfloat16": np.dtype(np.uint16)}
_SIDE = {"float32": 1, "bfloat16": 2}  # inputs side by side in a line


class PackedWeight(msgspec.Struct, frozen=True):
    """Matrix in the layout of the native ops: panels of PANEL outputs, or contiguous rows."""

    kind: int  # index in WEIGHT_KINDS
    values: Array
    scales: Array | None = None  # of integers: [panels][groups][PANEL], with multipliers float32 [panels][PANEL]
    multipliers: Array | None = None  # int8 [panels][groups][PANEL]
    offsets: Array | None = None  # [panels][groups][PANEL]
    scale_kind: int = 0  # of scales and offsets, index in SCALE_DTYPES
    group_size: int = 0
    is_in_panels: bool = True
    bias: Array | None = None  # of experts: float32 [panels][PANEL]


class PackedExperts(msgspec.Struct, frozen=True):
    """Matrices of many experts, slot after slot. Ops read the slot of each expert in `slots` whenever they run."""

    gate_up: PackedWeight
    down: PackedWeight
    slots: Array  # int32 [experts]

    def arrays(self) -> list[Array]:
        """Return all packed arrays; each has the same amount of every slot."""
        of_each = [(part.values, part.scales, part.multipliers, part.offsets, part.bias) for part in (self.gate_up, self.down)]
        return [array for arrays in of_each for array in arrays if isinstance(array, Array)]


def _floats(values: Values) -> np.ndarray:
    """Return [rows, columns], float32 or the bits of bfloat16, with any strides."""
    numbers = values if isinstance(values, np.ndarray) and values.dtype == np.uint16 else float32(values)
    return numbers if numbers.flags.aligned else numbers.copy()


def _fill_floats(packed: np.ndarray, kind: str, values: Values, is_in_panels: bool) -> None:
    numbers = _floats(values)
    rows, columns = numbers.shape
    row_stride, column_stride = (stride // numbers.itemsize for stride in numbers.strides)
    fill = _cpu.pack_panels if is_in_panels else _cpu.pack_rows
    is_bfloat16 = numbers.dtype == np.uint16
    number = WEIGHT_KINDS.index(kind)
    fill(packed.ctypes.data, number, numbers.ctypes.data, is_bfloat16, row_stride, column_stride, rows, columns)


def _pack_embedding(module: Embedding, source: Source, store: Store) -> None:
    """Pack an embedding. A tied one reads the panels of the linear with the same weight, which is packed before it."""
    if module.tied is not None:
        module.weight = module.tied.weight
        return
    kind = module.format.kind
    shape = (module.num_rows, module.width)
    parts = cut(source, module.num_rows, module.width, 1)
    fills = [(num_rows, partial(_fill, kind, part, False)) for num_rows, part in parts]
    rows = store.keep(module.name, shape, _DTYPES[kind], fills)
    module.weight = PackedWeight(WEIGHT_KINDS.index(kind), array_of(rows), is_in_panels=False)


def _pack_linear(module: Linear, sources: Mapping[str, Source], store: Store) -> None:
    module.weight = _packed(module.name, [module], [sources["weight"]], store)
    module.bias = _packed_biases(f"{module.name}.bias", module, [sources["bias"]], store) if module.has_bias else None


def _packed_biases(name: str, module: Linear, sources: Sequence[Source], store: Store) -> Array:
    """Pack biases of the width of `module`, one after another, each padded with zeros to whole panels."""

    def fill(kept: np.ndarray) -> None:
        for row, source in zip(kept, sources, strict=True):
            row[: module.width] = float32(source())
            row[module.width :] = 0

    num_outputs = -(-module.width // _cpu.PANEL) * _cpu.PANEL
    return array_of(store.keep(name, (len(sources), num_outputs), _FLOAT, fill).reshape(-1))


def _pack_experts(module: Experts, sources: Mapping[str, Source], store: Store) -> None:
    def packed(part: str, linears: Sequence[Linear]) -> PackedWeight:
        name, keys = f"{module.name}.{part}", [f"{part}.{index}" for index in range(module.num_experts)]
        weight = _packed(name, linears, [sources[key] for key in keys], store)
        if not module.has_bias:
            return weight
        biases = _packed_biases(f"{name}.bias", linears[0], [sources[f"{key}.bias"] for key in keys], store)
        return msgspec.structs.replace(weight, bias=biases)

    gate_up, down = (packed(part, linears) for part, linears in module.parts.items())
    module.weight = PackedExperts(gate_up, down, array_of(np.arange(module.num_experts, dtype=np.int32)))


def _packed(name: str, linears: Sequence[Linear], sources: Sequence[Source], store: Store) -> PackedWeight:
    """Pack matrices of one shape and format, one after another. A source is read when it is packed."""
    module, importances = linears[0], [linear.importances for linear in linears]
    format = module.format
    if format.kind not in KINDS:
        return _packed_floats(name, module, sources, store)
    packing = IntPacking(name, format, module.num_inputs, module.width, sources, importances)
    found = packing.keep(store, _panels_read(module, len(sources)))
    values, scales, multipliers, offsets = (None if kept is None else array_of(kept.reshape(-1)) for kept in found)
    assert values is not None
    scale_kind = list(SCALE_DTYPES).index(format.scales)
    return PackedWeight(KINDS[format.kind], values, scales, multipliers, offsets, scale_kind, format.group_size)


def _packed_floats(name: str, module: Linear, sources: Sequence[Source], store: Store) -> PackedWeight:
    """Pack [out, in] as [panels][in / side][PANEL][side], with outputs and inputs padded with zeros."""
    kind = module.format.kind
    panel = _panel_size(kind, module.num_inputs)
    num_panels = -(-module.width // _cpu.PANEL)
    parts = [part for source in sources for part in cut(source, module.width, module.num_inputs, _cpu.PANEL)]
    fills = [(-(-num_rows // _cpu.PANEL), partial(_fill, kind, part, True)) for num_rows, part in parts]
    shape = (len(sources) * num_panels, panel)
    values = store.keep(f"{name}.weight", shape, _DTYPES[kind], fills, _panels_read(module, len(sources)))
    return PackedWeight(WEIGHT_KINDS.index(kind), array_of(values.reshape(-1)))


def _panels_read(module: Linear, count: int) -> list[tuple[int, int]]:
    """Return the spans of panels, of `count` such matrices, that this rank reads; empty: all."""
    own, size = panels_of(() if module.is_looked_up else module.columns), -(-module.width // _cpu.PANEL)
    return [(index * size + begin, index * size + end) for index in range(count) for begin, end in own]


def _fill(kind: str, source: Source, is_in_panels: bool, packed: np.ndarray) -> None:
    _fill_floats(packed, kind, source(), is_in_panels)


def _panel_size(kind: str, num_inputs: int) -> int:
    return -(-num_inputs // _SIDE[kind]) * _SIDE[kind] * _cpu.PANEL


def _pack_head_linear(module: HeadLinear, source: Source, store: Store) -> None:
    """Pack the heads one after another, each as a separate linear."""
    kind = module.format.kind
    size = -(-module.num_outputs // _cpu.PANEL) * _panel_size(kind, module.num_inputs)

    def fill(packed: np.ndarray) -> None:
        for to, weight in zip(packed.reshape(module.num_heads, size), module.weights_of_heads(_floats(source())), strict=True):
            _fill_floats(to, kind, weight, True)

    own = (module.heads.start * size, module.heads.stop * size)
    name = f"{module.name}.{module.rows.start}-{module.rows.stop}.weight"
    module.weight = PackedWeight(
        WEIGHT_KINDS.index(kind), array_of(store.keep(name, (module.num_heads * size,), _DTYPES[kind], fill, [own]))
    )

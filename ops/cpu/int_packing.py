"""Integer weights of the native table, in panels of outputs: quantized here, or integers of the checkpoint.

int8 [panels][inputs / 4][PANEL][4], each with an offset of 128; int4 [panels][inputs / 8][PANEL][4], four inputs in the low
halves and the next four in the high ones; float4 like int4. Scales, and offsets if any, are [panels][groups][PANEL] of the
format's type; if scales are folded, they are float32 [panels][PANEL] and multipliers int8 [panels][groups][PANEL]. Padding
represents zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ops import _cpu
from ops.cpu.cuts import cut
from ops.weight_format import Fill, Memory, Parts, QuantizedWeight, Source, Store, WeightFormat, float32

KINDS = {"int8": 2, "int4": 3, "float4": 4}  # the kinds packed here, as in `WeightKind` of native/kernels.h

# types of scales and offsets, in the order of `ScaleKind` there; uint16: the bits of bfloat16
SCALE_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}

_FLOAT, _BYTE, _SIGNED = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int8)


class IntPacking:
    """Packing of matrices [num_outputs, num_inputs] from their sources into a store, one after another. Values are filled
    first, which reads the sources and also computes the scales."""

    def __init__(
        self,
        name: str,
        format: WeightFormat,
        num_inputs: int,
        num_outputs: int,
        sources: Sequence[Source],
        importances: Sequence[np.ndarray | None] = (),
    ) -> None:
        """`importances`: of each matrix, `Linear.importances`."""
        self._name = name
        self._format = format
        self._kind = KINDS[format.kind]
        self._is_int8 = format.kind == "int8"
        self._num_inputs = num_inputs
        self._num_outputs = num_outputs
        self._sources = sources
        self._importances = importances or [None] * len(sources)
        self._made: dict[tuple[str, int], np.ndarray] = {}
        assert not format.is_folded or (format.kind, format.has_offsets) == ("int4", False), f"{name}: {format}"
        assert not format.is_folded or format.group_size in _cpu.FOLDED_GROUPS, f"{name}: {format}"
        assert format.scales == "float32" or (format.group_size and not format.is_folded), f"{name}: {format}"

    def keep(self, store: Store, panels: Parts = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return the values, uint8 [panels, lines, LINE], and the format's scales, multipliers and offsets. `panels`: those
        that will be read; empty: all."""
        num_matrices = len(self._sources)

        def keep(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            fills: list[tuple[int, Fill]] = [(shape[0], partial(self._fill, name, index)) for index in range(num_matrices)]
            if name == "weight":
                fills = [fill for index in range(num_matrices) for fill in self._fills_of_values(index)]
            return store.keep(f"{self._name}.{name}", (num_matrices * shape[0], *shape[1:]), dtype, fills, panels)

        num_panels = -(-self._num_outputs // _cpu.PANEL)
        num_lines = -(-self._num_inputs // (4 if self._is_int8 else 8))
        values = keep("weight", (num_panels, num_lines, 4 * _cpu.PANEL), _BYTE)
        of_scales = SCALE_DTYPES[self._format.scales]
        scales = keep("scales", self._scales_shape(), of_scales)
        multipliers = keep("multipliers", self._grouped(), _SIGNED) if self._format.is_folded else None
        offsets = keep("offsets", self._grouped(), of_scales) if self._format.has_offsets else None
        self._made.clear()
        return values, scales, multipliers, offsets

    def _grouped(self) -> tuple[int, int, int]:
        num_groups = -(-self._num_inputs // (self._format.group_size or self._num_inputs))
        return -(-self._num_outputs // _cpu.PANEL), num_groups, _cpu.PANEL

    def _scales_shape(self) -> tuple[int, int, int]:
        num_panels, num_groups, panel = self._grouped()
        return num_panels, 1 if self._format.is_folded else num_groups, panel

    def _fill(self, name: str, index: int, kept: np.ndarray) -> None:
        made = self._made[name, index]
        np.copyto(kept, made.view(np.uint32) >> 16 if kept.dtype == np.uint16 else made, casting="same_kind")

    def _fills_of_values(self, index: int) -> Iterator[tuple[int, Fill]]:
        first = 0
        for num_rows, source in cut(self._sources[index], self._num_outputs, self._num_inputs, _cpu.PANEL):
            num_panels = -(-num_rows // _cpu.PANEL)
            yield num_panels, partial(self._fill_values, index, slice(first, first + num_panels), source)
            first += num_panels

    def _fill_values(self, index: int, panels: slice, source: Source, packed: np.ndarray) -> None:
        values = source()
        if isinstance(values, QuantizedWeight) and values.format == self._format:
            self._lay(index, packed, values)
        else:
            self._quantize(index, panels, packed, float32(values) if isinstance(values, QuantizedWeight) else values)

    def _lay(self, index: int, packed: np.ndarray, weight: QuantizedWeight) -> None:
        integers = weight.values
        zero = {"int8": 128, "int4": 0 if self._format.has_offsets else 8, "float4": 0}[self._format.kind]
        output_stride, input_stride = integers.strides
        shape = (output_stride, input_stride, self._num_outputs, self._num_inputs)
        _cpu.lay_integers(packed.ctypes.data, self._kind, integers.ctypes.data, *shape, zero)
        for name, values in (("scales", weight.scales), ("multipliers", weight.multipliers), ("offsets", weight.offsets)):
            if values is not None:
                self._made[name, index] = _in_panels(values)

    def _quantize(self, index: int, panels: slice, packed: np.ndarray, floats: np.ndarray) -> None:
        """Quantize float32, or the bits of bfloat16, with any strides."""
        assert self._format.kind != "float4", f"{self._name}: floats are not quantized to float4"
        assert not self._format.has_offsets, f"{self._name}: floats are quantized without offsets"
        assert self._is_int8 or self._format.is_folded, f"{self._name}: floats can only be quantized to int4 with folded scales"
        is_narrow = self._format.scales == "bfloat16"
        assert is_narrow or self._format.scales == "float32", f"{self._name}: own scales are not float16"
        scales = self._made.setdefault(("scales", index), np.empty(self._scales_shape(), _FLOAT))[panels]
        address = 0
        if self._format.is_folded:
            multipliers = self._made.setdefault(("multipliers", index), np.empty(self._grouped(), _SIGNED))[panels]
            address = multipliers.ctypes.data
        output_stride, input_stride = (stride // floats.itemsize for stride in floats.strides)
        source = (floats.ctypes.data, floats.dtype == np.uint16, output_stride, input_stride)
        importances = self._importances[index]
        of_input = 0 if importances is None else importances.ctypes.data
        shape = (*floats.shape, self._format.group_size, is_narrow, of_input)
        _cpu.quantize_weight(packed.ctypes.data, scales.ctypes.data, address, self._kind, *source, *shape)


def rounded(values: np.ndarray, format: WeightFormat, importances: np.ndarray | None = None) -> QuantizedWeight:
    """Return floats [out, in], or the bits of bfloat16, rounded to `format` as by this table, for other tables."""
    num_outputs, num_inputs = values.shape
    packed, *others = IntPacking("", format, num_inputs, num_outputs, [lambda: values], [importances]).keep(Memory())
    lines = packed.reshape(*packed.shape[:2], _cpu.PANEL, 4)
    if format.kind == "int4":
        lines = np.stack([lines & 15, lines >> 4], axis=2).reshape(len(lines), -1, _cpu.PANEL, 4)
    else:
        lines = (lines ^ 128).view(np.int8)
    integers = lines.transpose(0, 2, 1, 3).reshape(len(lines) * _cpu.PANEL, -1)[:num_outputs, :num_inputs]
    scales, multipliers, offsets = (None if each is None else _by_output(_widened(each), num_outputs) for each in others)
    assert scales is not None, "the format has no scales"
    return QuantizedWeight(format, np.ascontiguousarray(integers), scales, offsets, multipliers)


def _widened(made: np.ndarray) -> np.ndarray:
    """Return scales or offsets as float32; multipliers stay."""
    return made if made.dtype == _SIGNED else float32(made)


def _by_output(grouped: np.ndarray, num_outputs: int) -> np.ndarray:
    """Return [panels, groups, PANEL] as [out, groups]."""
    by_output: np.ndarray = grouped.transpose(0, 2, 1).reshape(len(grouped) * _cpu.PANEL, -1)[:num_outputs]
    return by_output


def _in_panels(values: np.ndarray) -> np.ndarray:
    """Return [out, groups] as [panels, groups, PANEL]."""
    num_outputs, num_groups = values.shape
    filled = np.zeros((-(-num_outputs // _cpu.PANEL) * _cpu.PANEL, num_groups), values.dtype)
    filled[:num_outputs] = values
    in_panels: np.ndarray = filled.reshape(-1, _cpu.PANEL, num_groups).transpose(0, 2, 1)
    return in_panels

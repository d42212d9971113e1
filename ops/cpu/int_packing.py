"""Integer weights of the native table: a matrix quantized, or laid out as a checkpoint has it, in panels of outputs.

int8 [panels][inputs / 4][PANEL][4], each 128 more than it stands for; int4 [panels][inputs / 8][PANEL][4], four inputs in the
low halves and the next four in the high ones. Scales, and offsets where there are some, are float32 [panels][groups][PANEL].
What is filled up stands for zero.
"""

from __future__ import annotations

import numpy as np

from ops import _cpu
from ops.weight_format import QuantizedWeight, Source, Store, Values, WeightFormat, float32

KINDS = {"int8": 2, "int4": 3}  # those that are packed here, as `WeightKind` in native/kernels.h
MAX_INT4_GROUP = 128  # that floats are quantized in

_FLOAT = np.dtype(np.float32)


class IntPacking:
    """One matrix [num_outputs, num_inputs] on its way from its source to a store."""

    def __init__(self, name: str, format: WeightFormat, num_inputs: int, num_outputs: int, source: Source) -> None:
        self._name = name
        self._format = format
        self._kind = KINDS[format.kind]
        self._is_int8 = format.kind == "int8"
        self._num_inputs = num_inputs
        self._num_outputs = num_outputs
        self._source = source
        self._values: Values | None = None

    def keep(self, store: Store) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Values uint8 [panels, lines, LINE]; scales, and offsets where the format has them, [panels, groups, PANEL]."""
        num_panels = -(-self._num_outputs // _cpu.PANEL)
        num_groups = -(-self._num_inputs // (self._format.group_size or self._num_inputs))
        num_lines = -(-self._num_inputs // (4 if self._is_int8 else 8))
        grouped = (num_panels, num_groups, _cpu.PANEL)
        scales = store.keep(f"{self._name}.scales", grouped, _FLOAT, self._fill_scales)
        offsets = None
        if self._format.has_offsets:
            offsets = store.keep(f"{self._name}.offsets", grouped, _FLOAT, self._fill_offsets)

        def fill_values(packed: np.ndarray) -> None:
            self._fill_values(packed, scales)

        lines = (num_panels, num_lines, 4 * _cpu.PANEL)
        values = store.keep(f"{self._name}.weight", lines, np.dtype(np.uint8), fill_values)
        self._values = None
        return values, scales, offsets

    def _read(self) -> Values:
        """The source, read once: floats, or integers that are of this format already."""
        if self._values is None:
            values = self._source()
            if isinstance(values, QuantizedWeight) and values.format != self._format:
                values = float32(values)
            if isinstance(values, np.ndarray):
                assert not self._format.has_offsets, f"{self._name}: floats are quantized without offsets"
                is_fine = self._is_int8 or 0 < self._format.group_size <= MAX_INT4_GROUP
                assert is_fine, f"{self._name}: floats become int4 in groups of at most {MAX_INT4_GROUP}, not of {self._format}"
            self._values = values
        return self._values

    def _fill_scales(self, kept: np.ndarray) -> None:
        values = self._read()
        if isinstance(values, QuantizedWeight):
            _lay_groups(kept, values.scales)
        else:
            _cpu.weight_scales(kept.ctypes.data, self._kind, *self._floats(values), self._format.group_size)

    def _fill_offsets(self, kept: np.ndarray) -> None:
        values = self._read()
        assert isinstance(values, QuantizedWeight)
        assert values.offsets is not None
        _lay_groups(kept, values.offsets)

    def _fill_values(self, packed: np.ndarray, scales: np.ndarray) -> None:
        values = self._read()
        if not isinstance(values, QuantizedWeight):
            numbers = self._floats(values)
            _cpu.quantize_weight(packed.ctypes.data, scales.ctypes.data, self._kind, *numbers, self._format.group_size)
            return
        integers = values.values
        zero = 128 if self._is_int8 else 0 if self._format.has_offsets else 8
        output_stride, input_stride = integers.strides
        shape = (output_stride, input_stride, self._num_outputs, self._num_inputs)
        _cpu.lay_integers(packed.ctypes.data, self._kind, integers.ctypes.data, *shape, zero)

    def _floats(self, values: np.ndarray) -> tuple[int, bool, int, int, int, int]:
        """Where the native functions find them: address, whether they are bfloat16, strides in elements, shape."""
        output_stride, input_stride = (stride // values.itemsize for stride in values.strides)
        is_bfloat16 = values.dtype == np.uint16
        return values.ctypes.data, is_bfloat16, output_stride, input_stride, self._num_outputs, self._num_inputs


def _lay_groups(kept: np.ndarray, values: np.ndarray) -> None:
    """[out, groups] -> [panels, groups, PANEL]"""
    num_panels, num_groups, panel = kept.shape
    filled = np.zeros((num_panels * panel, num_groups), np.float32)
    filled[: len(values)] = values
    kept[...] = filled.reshape(num_panels, panel, num_groups).transpose(0, 2, 1)

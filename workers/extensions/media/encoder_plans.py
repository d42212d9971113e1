"""An encoder bound to its inputs: passes over slices of rows, recorded on a tape or op by op.

Owned by `encoder.py`. A slice keeps its state between two passes; memory used within a pass is shared by all slices.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ops.cpu.array import Array
from ops.cpu.executors import Recording, Tape
from ops.cpu.table import make_table
from ops.modules import Tensor
from ops.table import OpTable
from workers.encoders.tower import Call, Tower
from workers.extensions.media.encoder_inputs import EncoderInputs, SliceInputs


class SlicePlan(Protocol):
    inputs: SliceInputs

    def run(self, index: int) -> None:
        """Run a pass."""

    def features(self) -> list[np.ndarray]:
        """Return the last layer's results, which the tokens have side by side, [tokens, width] each."""


class EagerSlice:
    """Slice that runs op by op."""

    def __init__(self, tower: Tower, ops: OpTable, inputs: SliceInputs) -> None:
        self.inputs = inputs
        self._tower, self._ops = tower, ops
        self._call: Call | None = None
        self._features: list[Tensor] = []

    def run(self, index: int) -> None:
        if index > self._tower.config.depth:
            self._features = self._tower.finish_pairs(self._ops, self.inputs.paired(self._ops))
            return
        if index == 0:
            self._call = _begin(self._ops, self.inputs)
        assert self._call is not None, "a call begins with pass 0"
        self._features = self._tower.run_pass(self._ops, self._call, index)
        if self._features:
            self._call = None

    def features(self) -> list[np.ndarray]:
        return [feature.numpy()[: self.inputs.num_tokens] for feature in self._features]


class TapeSlice:
    """Slice on a tape of native ops; a pass is a range of it. `other`: a slice of the same plan that shares its memory within
    passes."""

    def __init__(self, tower: Tower, inputs: SliceInputs, other: TapeSlice | None) -> None:
        self.inputs = inputs
        recording = Recording()
        ops = make_table(recording)
        kept: list[Array] = []
        self._features: dict[int, list[Tensor]] = {}  # by the pass that makes them
        call, self._ends = _begin(ops, inputs), [0]
        for index in range(tower.config.depth + 1):
            features = tower.run_pass(ops, call, index)
            kept += [call.residual, call.queries, *features]
            self._ends.append(recording.num_ops)
        self._features[tower.config.depth] = features
        if tower.config.num_passes > len(self._ends) - 1:
            self._features[tower.config.depth + 1] = tower.finish_pairs(ops, inputs.paired(ops))
            kept += self._features[tower.config.depth + 1]
            self._ends.append(recording.num_ops)
        self._last = 0
        outputs = [feature for features in self._features.values() for feature in features]
        self.tape: Tape = recording.finish(*outputs, within=other.tape if other else None, apart=kept)

    def run(self, index: int) -> None:
        self.tape.replay_range(self._ends[index], self._ends[index + 1])
        self._last = index

    def features(self) -> list[np.ndarray]:
        return [feature.numpy()[: self.inputs.num_tokens] for feature in self._features[self._last]]


def _begin(ops: OpTable, inputs: SliceInputs) -> Call:
    pictures = ops.begin(inputs.pictures, inputs.cache)  # type: ignore[arg-type]
    windows = pictures
    if inputs.windows is not inputs.pictures:
        windows = ops.begin(inputs.windows, inputs.cache)  # type: ignore[arg-type]
    return Call(inputs, inputs.cache.layers, windows, pictures, inputs.angles(ops), inputs.hidden)


class Plan:
    """Plan of the slices of a call; slices are made as needed."""

    def __init__(self, tower: Tower, ops: OpTable, inputs: EncoderInputs) -> None:
        self.inputs = inputs
        self._tower, self._ops = tower, ops
        self._slices: list[SlicePlan] = []

    def slice_of(self, number: int) -> SlicePlan:
        while number >= len(self._slices):
            inputs = SliceInputs(self.inputs, len(self._slices) * self.inputs.slice_rows)
            self._slices.append(self._make_slice(inputs))
        return self._slices[number]

    def _make_slice(self, inputs: SliceInputs) -> SlicePlan:
        if not self.inputs.is_recorded:
            return EagerSlice(self._tower, self._ops, inputs)
        other = self._slices[0] if self._slices else None
        assert other is None or isinstance(other, TapeSlice)
        return TapeSlice(self._tower, inputs, other)

    @property
    def tapes(self) -> list[Tape]:
        """Tapes of the slices of the call."""
        return [each.tape for each in self._slices[: self.inputs.num_slices] if isinstance(each, TapeSlice)]

    def run(self, index: int, number: int) -> None:
        """Run pass `index` over a slice, with its rows set."""
        plan = self.slice_of(number)
        if index > self._tower.config.depth:
            if number == 0:
                self.inputs.set_frames(self.features()[0])
            if not plan.inputs.set_pairs():
                return
        plan.run(index)

    def features(self) -> list[np.ndarray]:
        """Return the results of all slices after a pass that makes them, [tokens, width] each."""
        slices = [self.slice_of(number) for number in range(self.inputs.num_slices)]
        found = [each.features() for each in slices if each.inputs.num_tokens]
        return [np.concatenate(of_slices) for of_slices in zip(*found, strict=True)]

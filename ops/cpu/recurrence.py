"""Ops of recurrent layers in the native table: convolutions, delta rule, state spaces, and the norm with a gate.

Their states are in slots of the state arena (`StateCache`), which the kernels read and write in place.
"""

from __future__ import annotations

from typing import Any

from ops import _cpu
from ops.cpu.array import Array, Rows, rows_of
from ops.cpu.executors import Executor
from ops.cpu.work import convolution_work, recurrence_work
from ops.modules import Convolution, DeltaRule, GatedNorm, HeadRange, LayerState, StateCache, StateSpaces, Tensor
from ops.table import NUM_SEQUENCES, Inputs


class RecurrentOps:
    """The ops, on one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def _sequences(self, inputs: Inputs) -> Rows:
        return self._executor.rows(inputs.host_counts, NUM_SEQUENCES, len(inputs.states))

    def convolve(self, inputs: Inputs, x: Tensor, module: Convolution, places: LayerState, cache: StateCache) -> Array:
        y = self._executor.allocate(rows_of(x), module.channels)
        y.columns = module.columns
        columns = module.columns or ((0, module.channels),)
        self._executor.emit(
            _cpu.convolve,
            y,
            x,
            x.shape[1],
            module.first,
            module.weight,
            module.bias,
            module.channels,
            module.kernel,
            module.activation == "silu",
            module.is_gated,
            [edge for span in columns for edge in span],
            places.window,
            places.window_log,
            *_states(inputs, cache),
            rows=self._sequences(inputs),
            name=module.name,
            work=lambda: convolution_work(y, inputs, sum(end - begin for begin, end in columns), module),
        )
        return y

    def delta_rule(
        self,
        inputs: Inputs,
        qkv: Tensor,
        decays: Tensor,
        betas: Tensor,
        module: DeltaRule,
        places: LayerState,
        cache: StateCache,
    ) -> Array:
        own, width = module.heads, module.value_dim
        y = self._heads(rows_of(qkv), own, module.num_value_heads, width)
        self._executor.emit(
            _cpu.delta_rule,
            y,
            qkv,
            decays,
            betas,
            y.width,
            qkv.shape[1],
            decays.shape[1],
            betas.shape[1],
            module.first,
            module.decay_first,
            module.beta_first,
            module.weight,
            module.bias,
            module.is_per_channel,
            module.epsilon,
            module.num_value_heads,
            module.num_key_heads,
            module.key_dim,
            width,
            own.first,
            own.count,
            places.matrix,
            places.matrix_log,
            4 * module.log_width,
            *_states(inputs, cache),
            rows=self._sequences(inputs),
            work=lambda: recurrence_work((y, qkv, decays, betas), inputs, own.count, module.key_dim, width, 2),
        )
        return y

    def state_space(
        self, inputs: Inputs, x: Tensor, dt: Tensor, module: StateSpaces, places: LayerState, cache: StateCache
    ) -> Array:
        own, width = module.heads, module.head_dim
        y = self._heads(rows_of(x), own, module.num_heads, width)
        self._executor.emit(
            _cpu.state_space,
            y,
            x,
            dt,
            y.width,
            x.shape[1],
            dt.shape[1],
            module.first,
            module.decay_first,
            module.weight,
            module.bias,
            module.skips,
            module.least,
            module.most,
            module.num_heads,
            module.num_groups,
            module.state_dim,
            width,
            own.first,
            own.count,
            places.matrix,
            places.matrix_log,
            4 * module.log_width,
            *_states(inputs, cache),
            rows=self._sequences(inputs),
            work=lambda: recurrence_work((y, x, dt), inputs, own.count, module.state_dim, width, 1),
        )
        return y

    def gated_norm(self, x: Tensor, gate: Tensor | None, module: GatedNorm) -> Array:
        """Normalize the columns of `x` that this rank has; those of `gate` are at their places among all."""
        y = self._executor.allocate(rows_of(x), x.shape[1])
        first, end = 0, module.width
        if isinstance(x, Array) and x.columns:
            y.columns, y.whole_width = x.columns, x.whole_width
            ((first, end),) = x.columns
        is_narrow = bool(y.whole_width)
        self._executor.emit(
            _cpu.gated_norm,
            y,
            x,
            gate,
            module.weight if module.has_norm else None,
            y.width,
            x.shape[1],
            0 if gate is None else gate.shape[1],
            0 if is_narrow else first,
            module.gate_first + first,
            0 if module.is_shared else first,
            (end - first) // module.group,
            module.group,
            0 if module.is_shared else module.group,
            module.epsilon,
            module.is_gated_first,
            module.activation == "sigmoid",
            rows=y.rows,
            name=module.name,
        )
        return y

    def _heads(self, rows: Rows, own: HeadRange, num_heads: int, width: int) -> Array:
        """Allocate the rank's heads side by side, each `width` wide."""
        y = self._executor.allocate(rows, own.count * width)
        if own.count < num_heads:
            y.columns, y.whole_width = ((own.first * width, (own.first + own.count) * width),), num_heads * width
        return y


def _states(inputs: Inputs, cache: StateCache) -> tuple[Any, ...]:
    """Return the state arena and the sequences of a step, as the ops take them."""
    memory = cache.memory
    sequences = inputs.sequence_offsets, inputs.sequence_starts, inputs.states
    return memory, len(memory), memory.shape[1], cache.num_logged, *sequences

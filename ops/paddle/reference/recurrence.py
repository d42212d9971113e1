"""Ops of recurrent layers, row after row, with states in slots of the state arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.nn import functional

from ops.modules import Columns, Convolution, DeltaRule, GatedNorm, HeadRange, LayerState, StateCache, StateSpaces
from ops.paddle.progress import got_on
from ops.paddle.reference.chunks import Cut, own_columns, part_of
from ops.paddle.reference.linears import normalize
from ops.table import NUM_SEQUENCES, SequenceState


class _Run(NamedTuple):
    """Rows of a sequence in a step: `num_rows` from `first` on, after `replayed` rows of the log."""

    first: int
    num_rows: int
    replayed: int
    state: SequenceState

    def slots_at(self, time: int) -> list[int]:
        """Return the slots that the state goes to when so many rows, logged ones too, were applied."""
        slots = [self.state.keep] if self.state.position + time == self.state.keep_at else []
        slots += [self.state.write] if time == self.replayed + self.state.num_certain else []
        return [slot for slot in slots if slot] if time <= self.replayed + self.state.num_certain else []

    def log_of(self, row: int) -> int | None:
        """Return the row of the log for one of the sequence's rows, if it is a draft."""
        draft = row - self.state.num_certain
        return draft if draft >= 0 and self.state.write else None


def _runs(step: Any) -> Iterator[_Run]:
    inputs = getattr(step, "inputs", step)
    offsets, starts = np.asarray(inputs.sequence_offsets), np.asarray(inputs.sequence_starts)
    states = np.asarray(inputs.states)
    for index in range(int(inputs.host_counts[NUM_SEQUENCES])):
        state = SequenceState(*states[index].tolist())
        first, end = int(offsets[index]), int(offsets[index + 1])
        if first < end or state.write or state.keep:
            yield _Run(first, end - first, int(starts[index]) - state.position, state)


class _Slots(NamedTuple):
    """Float32 numbers of the state arena: [slots, numbers of a slot]. Places are in bytes."""

    numbers: paddle.Tensor

    @staticmethod
    def of(cache: StateCache) -> _Slots:
        return _Slots(cache.memory.view("float32"))

    def read(self, slot: int, at: int, *shape: int) -> paddle.Tensor:
        return self.numbers[slot, at // 4 : at // 4 + math.prod(shape)].reshape(shape)

    def write(self, slot: int, at: int, values: paddle.Tensor) -> None:
        self.numbers[slot, at // 4 : at // 4 + values.size] = values.flatten()


def _moved(columns: Columns, distance: int) -> Columns:
    return tuple((begin + distance, end + distance) for begin, end in columns)


def convolve(
    step: Any, x: paddle.Tensor | Cut, module: Convolution, places: LayerState, cache: StateCache
) -> paddle.Tensor | Cut:
    channels, num_before = module.channels, module.kernel - 1
    columns = module.columns or ((0, channels),)
    places_of_own = paddle.to_tensor(np.concatenate([np.arange(begin, end) for begin, end in columns]))

    def part(number: int) -> paddle.Tensor:
        return part_of(x, _moved(columns, module.first + number * channels))

    rows = part(0) * part(2) if module.is_gated else part(0)
    weight = paddle.index_select(module.weight, places_of_own, axis=1)
    bias = None if module.bias is None else paddle.index_select(module.bias, places_of_own)
    y, slots = paddle.zeros(rows.shape), _Slots.of(cache)

    def stored(slot: int, at: int, num_rows: int) -> paddle.Tensor:
        return paddle.index_select(slots.read(slot, at, num_rows, channels), places_of_own, axis=1)

    def store(slot: int, at: int, values: paddle.Tensor) -> None:
        for number, row in enumerate(paddle.unbind(values) if len(values) else ()):
            parts = paddle.split(row, [end - begin for begin, end in columns])
            for (begin, _), part in zip(columns, parts, strict=True):
                slots.write(slot, at + 4 * (number * channels + begin), part)

    for run in _runs(step):
        window = stored(run.state.read, places.window, num_before)
        log = [stored(run.state.read, places.window_log, run.replayed)] if run.replayed else []
        inputs = paddle.concat([window, *log, rows[run.first : run.first + run.num_rows]])
        if run.num_rows:
            found = [inputs[run.replayed + tap :][: run.num_rows] * weight[tap] for tap in range(module.kernel)]
            y[run.first : run.first + run.num_rows] = paddle.add_n(found if bias is None else [found[0] + bias, *found[1:]])
        for time in range(run.replayed + run.num_rows + 1):
            for slot in run.slots_at(time):
                store(slot, places.window, inputs[time : time + num_before])
        if run.state.write:
            store(run.state.write, places.window_log, inputs[num_before + run.replayed + run.state.num_certain :])
        got_on()
    y = functional.silu(y) if module.activation == "silu" else y
    y = y * part(1) if module.is_gated else y
    return Cut(y, columns[0][0], channels, module.columns) if module.columns else y


class _Matrices(NamedTuple):
    """Places of a layer's matrices [heads, key_dim, value_dim], and of this rank's heads in them and in the log."""

    slots: _Slots
    places: LayerState
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_decays: int
    own: HeadRange

    @property
    def _matrix_at(self) -> int:
        return self.places.matrix + 4 * self.own.first * self.key_dim * self.value_dim

    def read(self, slot: int) -> paddle.Tensor:
        """Return this rank's matrices."""
        return self.slots.read(slot, self._matrix_at, self.own.count, self.key_dim, self.value_dim)

    def write(self, slot: int, state: paddle.Tensor) -> None:
        self.slots.write(slot, self._matrix_at, state)

    def _log_at(self, row: int) -> tuple[int, int, int]:
        """Return the places of this rank's keys, deltas and decays of a row."""
        own, keys, values = self.own, self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        width = keys + values + self.num_heads * self.num_decays
        numbers = (
            own.first_kv * self.key_dim,
            keys + own.first * self.value_dim,
            keys + values + own.first * self.num_decays,
        )
        first, second, third = (self.places.matrix_log + 4 * (row * width + number) for number in numbers)
        return first, second, third

    def logged(self, slot: int, row: int) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Return this rank's keys, deltas and decays of a row."""
        own, (keys_at, deltas_at, decays_at) = self.own, self._log_at(row)
        return (
            self.slots.read(slot, keys_at, own.kv_count, self.key_dim),
            self.slots.read(slot, deltas_at, own.count, self.value_dim),
            self.slots.read(slot, decays_at, own.count, self.num_decays),
        )

    def log(self, slot: int, row: int, *values: paddle.Tensor) -> None:
        for at, value in zip(self._log_at(row), values, strict=True):
            self.slots.write(slot, at, value)

    def of_heads(self, keys: paddle.Tensor) -> paddle.Tensor:
        """Return the key of each head, from those of key heads [key heads, key_dim]."""
        heads = np.arange(self.own.first, self.own.first + self.own.count)
        places = heads * self.num_key_heads // self.num_heads - self.own.first_kv
        return paddle.gather(keys, paddle.to_tensor(places))


def _recur(
    step: Any,
    matrices: _Matrices,
    keys: paddle.Tensor,
    queries: paddle.Tensor,
    decays: paddle.Tensor,
    delta: Callable[[paddle.Tensor, paddle.Tensor, int], paddle.Tensor],
) -> paddle.Tensor:
    """Apply every row to the state of its sequence: S = decay * S + key delta^T. keys, queries [R, key heads, key_dim], decays
    [R, heads, 1 or key_dim]; `delta` returns a row's deltas from decay * S and the keys of its heads. Return S^T query [R,
    heads * value_dim]."""
    rows = keys.shape[0]
    y = paddle.zeros([rows, matrices.own.count, matrices.value_dim])
    for run in _runs(step):
        state = matrices.read(run.state.read)
        for time in range(run.replayed + run.num_rows):
            _store(matrices, run, time, state)
            if time < run.replayed:
                own_keys, deltas, own_decays = matrices.logged(run.state.read, time)
                own_keys = matrices.of_heads(own_keys).unsqueeze(2)
                state = state * own_decays.unsqueeze(2) + own_keys * deltas.unsqueeze(1)
                continue
            place = time - run.replayed
            row = run.first + place
            own_keys, own_queries = (matrices.of_heads(each[row]).unsqueeze(2) for each in (keys, queries))
            state = state * decays[row].unsqueeze(2)
            deltas = delta(state, own_keys, row)
            state = state + own_keys * deltas.unsqueeze(1)
            y[row] = paddle.sum(state * own_queries, axis=1)
            if (log := run.log_of(place)) is not None:
                matrices.log(run.state.write, log, keys[row], deltas, decays[row])
        _store(matrices, run, run.replayed + run.num_rows, state)
        got_on()
    return y.reshape([rows, -1])


def _store(matrices: _Matrices, run: _Run, time: int, state: paddle.Tensor) -> None:
    for slot in run.slots_at(time):
        matrices.write(slot, state)


def _softplus(x: paddle.Tensor) -> paddle.Tensor:
    return functional.relu(x) + paddle.log1p(paddle.exp(-paddle.abs(x)))


def _of_rank(y: paddle.Tensor, own: HeadRange, num_heads: int, width: int) -> paddle.Tensor | Cut:
    return y if own.count == num_heads else Cut(y, own.first * width, num_heads * width)


def _heads_of(x: paddle.Tensor | Cut, first: int, heads: tuple[int, int], width: int) -> paddle.Tensor:
    """Return heads (first and count), `width` wide each, of columns that begin at `first`: [R, heads, width]."""
    begin = first + heads[0] * width
    return part_of(x, ((begin, begin + heads[1] * width),)).reshape([-1, heads[1], width])


def delta_rule(
    step: Any,
    qkv: paddle.Tensor | Cut,
    decays: paddle.Tensor | Cut,
    betas: paddle.Tensor | Cut,
    module: DeltaRule,
    places: LayerState,
    cache: StateCache,
) -> paddle.Tensor | Cut:
    own, dim, width = module.heads, module.key_dim, module.value_dim
    heads, key_heads, keys_width = (own.first, own.count), (own.first_kv, own.kv_count), module.num_key_heads * dim
    queries = _unit(_heads_of(qkv, module.first, key_heads, dim), module.epsilon) * dim**-0.5
    keys = _unit(_heads_of(qkv, module.first + keys_width, key_heads, dim), module.epsilon)
    values = _heads_of(qkv, module.first + 2 * keys_width, heads, width)
    biases = module.bias.reshape([module.num_value_heads, module.num_decays])[own.first : own.first + own.count]
    rates = module.weight[own.first : own.first + own.count].unsqueeze(1)
    inputs = _heads_of(decays, module.decay_first, heads, module.num_decays)
    factors = functional.sigmoid(_heads_of(betas, module.beta_first, heads, 1))

    def delta(state: paddle.Tensor, keys: paddle.Tensor, row: int) -> paddle.Tensor:
        return (values[row] - paddle.sum(state * keys, axis=1)) * factors[row]

    sizes = module.num_value_heads, module.num_key_heads, dim, width, module.num_decays
    matrices = _Matrices(_Slots.of(cache), places, *sizes, own)
    y = _recur(step, matrices, keys, queries, paddle.exp(rates * _softplus(inputs + biases)), delta)
    return _of_rank(y, own, module.num_value_heads, width)


def _unit(x: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    return x * paddle.rsqrt(paddle.sum(x * x, axis=-1, keepdim=True) + epsilon)


def state_space(
    step: Any,
    x: paddle.Tensor | Cut,
    dt: paddle.Tensor | Cut,
    module: StateSpaces,
    places: LayerState,
    cache: StateCache,
) -> paddle.Tensor | Cut:
    own, dim, width = module.heads, module.state_dim, module.head_dim
    heads, groups = (own.first, own.count), (own.first_kv, own.kv_count)
    inner, span = module.first + module.num_heads * width, slice(own.first, own.first + own.count)
    values = _heads_of(x, module.first, heads, width)
    b, c = (_heads_of(x, inner + number * module.num_groups * dim, groups, dim) for number in (0, 1))
    steps = _softplus(_heads_of(dt, module.decay_first, heads, 1) + module.bias[span].unsqueeze(1))
    steps = paddle.clip(steps, module.least, module.most)
    deltas = values * steps
    matrices = _Matrices(_Slots.of(cache), places, module.num_heads, module.num_groups, dim, width, 1, own)
    decays = paddle.exp(module.weight[span].unsqueeze(1) * steps)
    y = _recur(step, matrices, b, c, decays, lambda state, keys, row: deltas[row])
    skipped = (values * module.skips[span].unsqueeze(1)).reshape(y.shape)
    return _of_rank(y + skipped, own, module.num_heads, width)


def gated_norm(x: paddle.Tensor | Cut, gate: paddle.Tensor | Cut | None, module: GatedNorm) -> paddle.Tensor | Cut:
    y = own_columns(x)
    begin = x.begin if isinstance(x, Cut) else 0
    end = begin + y.shape[1]
    gates = None
    if gate is not None:
        activation = functional.silu if module.activation == "silu" else functional.sigmoid
        gates = activation(part_of(gate, ((module.gate_first + begin, module.gate_first + end),)))
    is_gated_first = module.is_gated_first or not module.has_norm
    if gates is not None and is_gated_first:
        y = y * gates
    if module.has_norm:
        weight = (module.weight if module.is_shared else module.weight[begin:end]).reshape([-1, module.group])
        y = normalize(y.reshape([y.shape[0], -1, module.group]), weight, module.epsilon).reshape(y.shape)
    if gates is not None and not is_gated_first:
        y = y * gates
    return Cut(y, begin, x.width) if isinstance(x, Cut) else y

"""Recurrent layers for tests of the ops: their formulas in float64, token by token, and sequences that run through steps of any
cut, with drafts, on slots of a state arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.utils import dlpack

from ops.modules import Convolution, DeltaRule, LayerState, StateCache, StateSpaces
from ops.paddle import reference
from ops.paddle.reference import own_columns
from ops.table import OpTable, SequenceState
from tests.ops.packing import pack
from tests.ops.steps import MAX_SEQS, HandMadeStep

NUM_LOGGED = 4
NUM_POSITIONS = 100
LINE = 64


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


class Sizes(NamedTuple):
    """Floats of a layer's parts in a slot."""

    window: int
    matrix: int
    window_log: int
    matrix_log: int


class ConvolvedLayer:
    """A convolution; its rows are x, or B | C | x."""

    def __init__(self, module: Convolution) -> None:
        self.module = module
        self.row_widths = [module.channels * (3 if module.is_gated else 1) + module.first]
        self.width = module.channels
        self.sizes = Sizes((module.kernel - 1) * module.channels, 0, NUM_LOGGED * module.channels, 0)
        self.weights = {"weight": random(module.channels, 1, module.kernel, seed=1)}
        if module.has_bias:
            self.weights["bias"] = random(module.channels, seed=2)

    def run(self, k: OpTable, step: Any, rows: Sequence[Any], places: LayerState, cache: StateCache) -> Any:
        return k.convolve(step, rows[0], self.module, places, cache)

    def expected(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the results of all positions of one sequence."""
        (x,), module = [each.astype(np.float64)[:, self.module.first :] for each in rows], self.module
        b, c, x = np.split(x, 3, axis=1) if module.is_gated else (np.ones(1), np.ones(1), x)
        inputs = np.concatenate([np.zeros((module.kernel - 1, module.channels)), b * x])
        weight = self.weights["weight"].astype(np.float64)[:, 0]
        y = np.stack([(inputs[t : t + module.kernel].T * weight).sum(1) for t in range(len(x))]) + self.weights.get("bias", 0)
        return (silu(y) if module.activation else y) * c


class DeltaLayer:
    """A gated delta rule; its rows are qkv, a and b."""

    def __init__(self, module: DeltaRule) -> None:
        self.module = module
        heads, keys = module.num_value_heads, module.num_key_heads * module.key_dim
        qkv = 2 * keys + heads * module.value_dim
        self.row_widths = [
            qkv + module.first,
            heads * module.num_decays + module.decay_first,
            heads + module.beta_first,
        ]
        self.width = heads * module.value_dim
        self.sizes = Sizes(0, heads * module.key_dim * module.value_dim, 0, NUM_LOGGED * module.log_width)
        rates = np.random.default_rng(3).uniform(-3, 2, heads).astype(np.float32)
        self.weights = {"A_log": rates, "dt_bias": random(heads * module.num_decays, seed=4)}

    def run(self, k: OpTable, step: Any, rows: Sequence[Any], places: LayerState, cache: StateCache) -> Any:
        return k.delta_rule(step, *rows, self.module, places, cache)

    def expected(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        module, heads = self.module, self.module.num_value_heads
        qkv, a, b = (each.astype(np.float64) for each in rows)
        keys_width = module.num_key_heads * module.key_dim
        q, k, v = np.split(qkv[:, module.first :], [keys_width, 2 * keys_width], axis=1)
        q, k = (each.reshape(len(qkv), module.num_key_heads, -1) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + module.epsilon) for each in (q, k))
        q, k = (each.repeat(heads // module.num_key_heads, axis=1) for each in (q / np.sqrt(module.key_dim), k))
        v = v.reshape(len(qkv), heads, -1)
        dt = softplus(a[:, module.decay_first :] + self.weights["dt_bias"]).reshape(len(qkv), heads, -1)
        decays = np.exp(-np.exp(self.weights["A_log"].astype(np.float64))[:, None] * dt)
        betas = 1 / (1 + np.exp(-b[:, module.beta_first :]))
        state = np.zeros((heads, module.key_dim, module.value_dim))
        results = []
        for t in range(len(qkv)):
            state = state * decays[t][:, :, None]
            delta = betas[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * delta[:, None]
            results.append(np.einsum("hkv,hk->hv", state, q[t]).ravel())
        return np.stack(results)


class StateSpaceLayer:
    """Mamba-2; its rows are x | B | C and dt."""

    def __init__(self, module: StateSpaces) -> None:
        self.module = module
        heads, inner = module.num_heads, module.num_heads * module.head_dim
        self.row_widths = [inner + 2 * module.num_groups * module.state_dim + module.first, heads + module.decay_first]
        self.width = inner
        self.sizes = Sizes(0, heads * module.state_dim * module.head_dim, 0, NUM_LOGGED * module.log_width)
        rates = np.random.default_rng(3).uniform(-3, 1, heads).astype(np.float32)
        self.weights = {"A_log": rates, "dt_bias": random(heads, seed=4), "D": random(heads, seed=5)}

    def run(self, k: OpTable, step: Any, rows: Sequence[Any], places: LayerState, cache: StateCache) -> Any:
        return k.state_space(step, *rows, self.module, places, cache)

    def expected(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        module, heads = self.module, self.module.num_heads
        xbc, inputs = (each.astype(np.float64) for each in rows)
        inner, groups = heads * module.head_dim, module.num_groups * module.state_dim
        x, b, c = np.split(xbc[:, module.first :], [inner, inner + groups], axis=1)
        x = x.reshape(len(x), heads, -1)
        b, c = (each.reshape(len(x), module.num_groups, -1).repeat(heads // module.num_groups, axis=1) for each in (b, c))
        dt = np.clip(softplus(inputs[:, module.decay_first :] + self.weights["dt_bias"]), module.least, module.most)
        decays = np.exp(-np.exp(self.weights["A_log"].astype(np.float64)) * dt)
        state = np.zeros((heads, module.state_dim, module.head_dim))
        results = []
        for t in range(len(x)):
            state = state * decays[t][:, None, None] + b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
            y = np.einsum("hsd,hs->hd", state, c[t]) + self.weights["D"][:, None] * x[t]
            results.append(y.ravel())
        return np.stack(results)


Layer = ConvolvedLayer | DeltaLayer | StateSpaceLayer


def state_cache(k: OpTable, memory: np.ndarray) -> StateCache:
    """Return the slots in `memory` as the table needs them."""
    return StateCache(dlpack.from_dlpack(memory) if k is reference.TABLE else memory, NUM_LOGGED)


class Rows(NamedTuple):
    """Rows of one sequence in a step: `count` certain ones, and `drafts`, of which the first `accepted` are right."""

    sequence: int
    count: int
    drafts: int = 0
    accepted: int = 0
    keep_at: int = -1  # position before which the state is kept


@dataclass
class Sequences:
    """Sequences of a layer, their slots, and what they computed."""

    k: OpTable
    layer: Layer
    results: dict[int, list[np.ndarray]] = field(default_factory=dict)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)  # sequence and position -> slot

    def __post_init__(self) -> None:
        pack(self.k, self.layer.module, **self.layer.weights)
        at, places = 0, []
        for floats in self.layer.sizes:
            places.append(at)
            at += -(-4 * floats // LINE) * LINE
        self.places = LayerState(*places)
        self.memory = np.full((400, at), 0xC5, np.uint8)  # as float32 -6.3e3, so that reading it shows
        self.memory[0] = 0
        self.cache = state_cache(self.k, self.memory)
        self.step = HandMadeStep([(0, 0, 1)], row_tile=self.k.row_tile)
        self.step.inputs.add("states", MAX_SEQS, 6)
        self.slots: dict[int, tuple[int, int, int]] = {}  # of sequences: slot, its position, tokens that are confirmed
        self.num_slots = 1

    def inputs_of(self, sequence: int, seed: int = 0) -> list[np.ndarray]:
        """Return the rows of all positions."""
        return [
            random(NUM_POSITIONS, width, seed=1000 * sequence + 10 * n + seed) for n, width in enumerate(self.layer.row_widths)
        ]

    def run(self, rows: Iterable[Rows]) -> None:
        """Run a step."""
        batch = list(rows)
        states, sequences, inputs = [], [], [[] for _ in self.layer.row_widths]  # type: ignore[var-annotated]
        for row in batch:
            slot, position, start = self.slots.get(row.sequence, (0, 0, 0))
            write = self._take()
            keep = self._take() if row.keep_at >= 0 else 0
            states.append(SequenceState(slot, position, write, keep, max(row.keep_at, 0), row.count))
            sequences.append((row.sequence, start, row.count + row.drafts))
            right, wrong = self.inputs_of(row.sequence), self.inputs_of(row.sequence, seed=1)
            first_wrong = start + row.count + row.accepted
            for column, (good, bad) in zip(inputs, zip(right, wrong, strict=True), strict=True):
                column.append(np.concatenate([good[start:first_wrong], bad[first_wrong : start + row.count + row.drafts]]))
            self.slots[row.sequence] = write, start + row.count, first_wrong
            if keep:
                self.kept[row.sequence, row.keep_at] = keep
        self._set(sequences, states)
        found = self._results([np.concatenate(column) for column in inputs])
        offset = 0
        for row, (_, _, count) in zip(batch, sequences, strict=True):
            self.results.setdefault(row.sequence, []).append(found[offset : offset + row.count + row.accepted])
            offset += count

    def _take(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def _set(self, sequences: list[tuple[int, int, int]], states: list[SequenceState]) -> None:
        self.step.set(sequences)
        self.step.inputs.set("states", np.array(states, np.int32))

    def _results(self, rows: list[np.ndarray]) -> np.ndarray:
        inputs = self.step.inputs
        padded = []
        for own in rows:
            whole = np.zeros((inputs.num_rows, own.shape[1]), np.float32)
            whole[: len(own)] = own
            padded.append(paddle.to_tensor(whole))
        y = self.layer.run(self.k, inputs, padded, self.places, self.cache)
        found: np.ndarray = own_columns(y).numpy()
        return found.copy()

    def result(self, sequence: int) -> np.ndarray:
        return np.concatenate(self.results[sequence])

    def state(self, slot: int) -> np.ndarray:
        """Return the window and the matrix in a slot, without logs."""
        sizes = self.layer.sizes
        parts = ((self.places.window, sizes.window), (self.places.matrix, sizes.matrix))
        return np.concatenate([self.memory[slot, at : at + 4 * floats] for at, floats in parts])

    def expected(self, sequence: int) -> np.ndarray:
        return self.layer.expected(self.inputs_of(sequence))

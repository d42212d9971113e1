"""LoRA adapters of a linear: the sum equals numpy's over weights of every format; a row has the bits that it has alone and,
without an adapter, those of the plain linear.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from engine.checkpoint.adapters.layout import AdaptedModule, AdapterLayout, whole_lines
from ops.modules import Linear
from ops.table import OpTable, Routing
from ops.weight_format import WeightFormat
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep
from tests.ops.tables import TABLES, table
from tests.ops.test_experts import experts_of, weights_of
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.reader import AdaptedLinear

INPUTS, OUTPUTS, ROWS = 37, (40, 16, 21), 48
MAX_RANK = 40
RANKS = ((8, 0, 1), (16, 33, 5), (40, 40, 40), (0, 0, 0))  # of each adapter, in each part


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Adapted:
    """A linear of three parts with some adapters, and their results in numpy. `columns`: those that the rank computes."""

    def __init__(self, k: OpTable, kind: str = "float32", columns: tuple[tuple[int, int], ...] = ()) -> None:
        modules, at = [], 0
        for index, num_outputs in enumerate(OUTPUTS):
            b = at + INPUTS * whole_lines(MAX_RANK)
            modules.append(AdaptedModule(f"part{index}", index, INPUTS, num_outputs, at, b))
            at = b + whole_lines(num_outputs) * whole_lines(MAX_RANK)
        layout = AdapterLayout(tuple(modules), len(RANKS), MAX_RANK, at, at)
        arena = AdapterArena(memoryview(np.full(layout.num_bytes, 0xFF, np.uint8)), layout)  # NaN, where nothing is written
        self.module = Linear(tuple(module.name for module in modules), INPUTS, OUTPUTS, columns=columns)
        self.module.format = WeightFormat(kind, 32, is_folded=True) if kind == "int4" else WeightFormat(kind, 0)
        self.added: list[np.ndarray] = []  # of each adapter [inputs, outputs], float64
        for slot, ranks in enumerate(RANKS):
            linears = [
                AdaptedLinear(module, random(rank, INPUTS, seed=9 * slot + 3), random(module.num_outputs, rank, seed=slot + 50))
                for module, rank in zip(modules, ranks, strict=True)
                if rank
            ]
            arena.write(slot, linears)
            by_index = {each.module.index: each.a.T.astype(np.float64) @ each.b.T.astype(np.float64) for each in linears}
            parts = [by_index.get(index, np.zeros((INPUTS, count))) for index, count in enumerate(OUTPUTS)]
            self.added.append(np.concatenate(parts, axis=1))
        self.k = k
        pack(k, self.module, weight=random(sum(OUTPUTS), INPUTS, seed=1))
        arena.bind([self.module])

    def __call__(self, x: np.ndarray, row_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the linear's result, and the one with adapters."""
        step = HandMadeStep([(3, 0, len(x))], row_tile=self.k.row_tile, has_adapters=True)
        step.inputs.set("adapter_slots", row_slots, -1)
        begun = self.k.begin(step.inputs, step.cache(self.k, 1, 8))
        tensor = paddle.to_tensor(x)
        y = self.k.linear(tensor, self.module)
        alone = np.array(y.numpy() if hasattr(y, "numpy") else y.tensor.numpy())
        return alone, np.array(self.k.adapt(begun, y, tensor, self.module).numpy())


def some_slots(seed: int = 5) -> np.ndarray:
    slots = np.random.default_rng(seed).integers(-1, len(RANKS), ROWS).astype(np.int32)
    slots[10:20], slots[20:23] = 2, -1
    return slots


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_the_sum(k: OpTable, kind: str) -> None:
    adapted, x, slots = Adapted(k, kind), random(ROWS, INPUTS, seed=2), some_slots()
    alone, found = adapted(x, slots)
    expected = alone.astype(np.float64)
    for slot, added in enumerate(adapted.added):
        expected[slots == slot] += x[slots == slot].astype(np.float64) @ added
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(found[slots < 0], alone[slots < 0])
    np.testing.assert_array_equal(found[slots == 3], alone[slots == 3])


def test_row_has_the_same_bits_in_any_batch(k: OpTable) -> None:
    adapted, x, slots = Adapted(k), random(ROWS, INPUTS, seed=2), some_slots()
    _, whole = adapted(x, slots)
    generator = np.random.default_rng(3)
    for size in (k.row_tile, 16, 32):
        chosen = generator.permutation(ROWS)[:size]
        _, found = adapted(x[chosen], slots[chosen])
        np.testing.assert_array_equal(found, whole[chosen])


def test_no_row_has_an_adapter(k: OpTable) -> None:
    alone, found = Adapted(k)(random(ROWS, INPUTS), np.full(ROWS, -1, np.int32))
    np.testing.assert_array_equal(found, alone)


def test_the_same_bits_on_several_ranks() -> None:
    """Each rank has whole panels of each part, or heads that are not whole panels."""
    from ops.cpu.table import TABLE

    x, slots = random(ROWS, INPUTS, seed=2), some_slots()
    _, whole = Adapted(TABLE)(x, slots)
    for columns in (((0, 16), (40, 56), (56, 72)), ((16, 40), (56, 56), (72, 77)), ((8, 24), (44, 48), (60, 70))):
        _, found = Adapted(TABLE, columns=columns)(x, slots)
        for begin, end in columns:
            np.testing.assert_array_equal(found[:, begin:end], whole[:, begin:end])


def test_a_slot_that_is_not_there() -> None:
    from ops.cpu.table import TABLE

    slots = np.full(ROWS, -1, np.int32)
    slots[3] = len(RANKS)
    with pytest.raises(IndexError, match="adapter slot 4 of 4"):
        Adapted(TABLE)(random(ROWS, INPUTS), slots)


EXPERT_RANKS = ((8, 3, 16), (1, 0, 33), (5, 5, 5))  # of gate, up and down of an expert, moved by its number, of each adapter


class AdaptedExperts:
    """Four experts with some adapters, and the linears of each with the same weights and adapters."""

    def __init__(self, k: OpTable, format: WeightFormat, hidden: int, inner: int) -> None:
        modules, at = [], 0
        for expert in range(4):
            for name, inputs, outputs in (("gate", hidden, inner), ("up", hidden, inner), ("down", inner, hidden)):
                b = at + inputs * whole_lines(MAX_RANK)
                modules.append(AdaptedModule(f"{expert}.{name}", len(modules), inputs, outputs, at, b))
                at = b + whole_lines(outputs) * whole_lines(MAX_RANK)
        layout = AdapterLayout(tuple(modules), len(EXPERT_RANKS), MAX_RANK, at, 0)
        arena = AdapterArena(memoryview(np.full(layout.num_bytes, 0xFF, np.uint8)), layout)
        for slot, ranks in enumerate(EXPERT_RANKS):
            linears = []
            for index, module in enumerate(modules):
                if rank := ranks[(index + index // 3) % 3]:
                    a = random(rank, module.num_inputs, seed=9 * slot + index) / 8
                    linears.append(AdaptedLinear(module, a, random(module.num_outputs, rank, seed=slot + 50 + index)))
            arena.write(slot, linears)
        gate_up = weights_of(4, (2 * inner, hidden), format, 10)
        down = weights_of(4, (hidden, inner), format, 20)
        self.module = experts_of(k, gate_up, down, format)
        self.linears = [
            (
                Linear((f"{expert}.gate", f"{expert}.up"), hidden, (inner, inner), format=format),
                Linear((f"{expert}.down",), inner, (hidden,), format=format),
            )
            for expert in range(4)
        ]
        for expert, (first, second) in enumerate(self.linears):
            pack(k, first, weight=gate_up[expert])
            pack(k, second, weight=down[expert])
            own_first, own_second = self.module.gate_up[expert], self.module.down[expert]
            own_first.names, own_first.num_outputs, own_second.names = first.names, first.num_outputs, second.names
        arena.bind([linear for both in self.linears for linear in both], [self.module])
        self.k = k

    def experts(self, x: np.ndarray, ids: np.ndarray, row_slots: np.ndarray) -> np.ndarray:
        routing = Routing(paddle.to_tensor(ids), paddle.ones(ids.shape), paddle.to_tensor(row_slots))
        return np.array(self.k.experts(paddle.to_tensor(x), routing, self.module, "silu", None).numpy())

    def by_linears(self, x: np.ndarray, expert: int, row_slots: np.ndarray) -> np.ndarray:
        step = HandMadeStep([(3, 0, len(x))], row_tile=self.k.row_tile, has_adapters=True)
        step.inputs.set("adapter_slots", row_slots, -1)
        begun, h = self.k.begin(step.inputs, step.cache(self.k, 1, 8)), paddle.to_tensor(x)
        first, second = self.linears[expert]
        gate_up = self.k.adapt(begun, self.k.linear(h, first), h, first)
        activated = self.k.activate_and_multiply(gate_up, "silu")
        return np.array(self.k.adapt(begun, self.k.linear(activated, second), activated, second).numpy())


@pytest.mark.parametrize("format", [WeightFormat("float32"), WeightFormat("int8")], ids=lambda format: format.kind)
@pytest.mark.parametrize("name", [each for each in TABLES if each != "cuda"])  # adapters are for CPUs
def test_expert_equals_its_adapted_linears(name: str, format: WeightFormat) -> None:
    """Bit for bit, in any batch; a row without an adapter, or an expert, has the bits that it has without adapters."""
    with table(name) as k:
        adapted, x = AdaptedExperts(k, format, 36, 21), random(ROWS, 36, seed=2)
        ids = np.random.default_rng(1).integers(-1, 4, (ROWS, 1)).astype(np.int32)
        slots = np.random.default_rng(5).integers(-1, len(EXPERT_RANKS), ROWS).astype(np.int32)
        found = adapted.experts(x, ids, slots)
        for expert in range(4):
            rows = ids[:, 0] == expert
            np.testing.assert_array_equal(found[rows], adapted.by_linears(x, expert, slots)[rows])
        chosen = np.random.default_rng(3).permutation(ROWS)[:16]
        np.testing.assert_array_equal(adapted.experts(x[chosen], ids[chosen], slots[chosen]), found[chosen])
        adapted.module.adapters = None
        plain = adapted.experts(x, ids, slots)
        np.testing.assert_array_equal(plain[slots < 0], found[slots < 0])
        assert (plain != found)[(slots >= 0) & (ids[:, 0] >= 0)].any(axis=1).all()

"""Experts that ranks share, by kernels alone: the ranks run one after another in this process, where none waits for another.

Each exchange is run three times, because a rank sees only what the others have sent before: first their rows, then their
results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.parallel.placement import owners, round_robin, without_missing
from ops.cuda.array import CudaArray, HostMemory, array_on
from ops.cuda.sharing import OfferLayout, SharedMemory, Windows
from ops.cuda.table import make_table
from ops.modules import Experts, RoutingRule
from ops.table import OpTable, Routing
from tests.ops.tables import emulated_card
from tests.ops.test_experts import experts_of, random, router_of

EXPERTS, CHOSEN, HIDDEN, INNER, MAX_ROWS = 7, 3, 40, 24, 8
MEMORY = HostMemory()


class Rank:
    """Rank `place` of `num_ranks`, of which `num_same` have the same rows: `rows` random ones."""

    def __init__(self, place: int, num_ranks: int, num_same: int, num_rows: int, most: list[int], dtype: str) -> None:
        self.place, self.counts = place, np.zeros(EXPERTS, np.uint64)
        self.layout = OfferLayout.of(MAX_ROWS, num_same, CHOSEN, HIDDEN, dtype)
        self.window = np.zeros(self.layout.num_bytes, np.uint8)
        self.addresses = array_on(MEMORY, np.zeros(8 * num_ranks, np.uint8))
        epoch = np.ones(1, np.int32)  # another one than in the windows: no rank waits
        windows = Windows(self.addresses, epoch, place, num_ranks, self.window.ctypes.data, len(self.window))
        shared = SharedMemory(windows, self.layout, lambda own: np.array([[count, count] for count in most]))
        self.table = make_table(emulated_card(), MEMORY, dtype=dtype, shared=lambda: shared)
        self.experts = random_experts(self.table)
        inputs: Any = SimpleNamespace(is_made_on_device=False, block_tables=(), num_rows=num_rows)
        inputs.kept = inputs
        self.table.begin(inputs, SimpleNamespace(block_size=16))  # type: ignore[arg-type]

    def place_experts(self, table: np.ndarray, windows: list[np.ndarray | None]) -> None:
        addresses = [0 if window is None else window.ctypes.data for window in windows]
        MEMORY.write(self.addresses.address, np.array(addresses, np.uint64).view(np.uint8))
        self.experts.owners, self.experts.counts = array_on(MEMORY, table), self.counts


def random_experts(table: OpTable) -> Experts:
    weights = (list(random(EXPERTS, *shape, seed=seed) / 8) for shape, seed in (((2 * INNER, HIDDEN), 1), ((HIDDEN, INNER), 2)))
    return experts_of(table, *weights)


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def rows_of(replica: int, num_rows: int, dtype: str) -> tuple[CudaArray, Routing, CudaArray]:
    """Return rows, their experts, and what is added to the results; the last row is padding."""
    generator = np.random.default_rng(replica)
    x, shared = (bits(random(num_rows, HIDDEN, seed=10 * replica + seed), dtype) for seed in (3, 4))
    ids = np.stack([generator.permutation(EXPERTS)[:CHOSEN] for _ in range(num_rows)]).astype(np.int32)
    ids[-1] = -1
    weights = np.abs(random(num_rows, CHOSEN, seed=replica))
    return (
        array_on(MEMORY, x, dtype),
        Routing(array_on(MEMORY, ids), array_on(MEMORY, weights)),
        array_on(MEMORY, shared, dtype),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_experts_have_the_bits_of_one_rank(dtype: str) -> None:
    """Two replicas of two ranks, with seven rows and four, and a third that is gone; some experts are on several ranks."""
    num_rows, num_same = [7, 4, 2], 2
    ranks = [Rank(place, 6, num_same, num_rows[place // 2], num_rows, dtype) for place in range(6)]
    placement = without_missing(round_robin(EXPERTS, 6, EXPERTS + 5), range(4))
    windows = [rank.window if rank.place < 4 else None for rank in ranks]
    for rank in ranks:
        rank.place_experts(owners(placement, EXPERTS), windows)
    given = [rows_of(replica, num_rows[replica], dtype) for replica in range(2)]
    for seed in range(3):
        emulated_card().seed(seed)
        found = []
        for rank in ranks[:4]:
            x, routing, shared = given[rank.place // num_same]
            found.append(rank.table.experts(x, routing, rank.experts, "silu", shared).numpy())
    alone = make_table(emulated_card(), MEMORY, dtype=dtype)
    module = random_experts(alone)
    for rank, answer in zip(ranks[:4], found, strict=True):
        x, routing, shared = given[rank.place // num_same]
        np.testing.assert_array_equal(answer, alone.experts(x, routing, module, "silu", shared).numpy())
        replica, part = divmod(rank.place, num_same)
        begin, end = (num_rows[replica] * place // num_same for place in (part, part + 1))
        sent = routing.ids.numpy()[begin:end]
        np.testing.assert_array_equal(rank.counts, 3 * np.bincount(sent[sent >= 0], minlength=EXPERTS))


def test_padded_rows_choose_no_experts() -> None:
    table, x = make_table(emulated_card(), MEMORY), random(5, 20)
    router = router_of(table, random(EXPERTS, 20, seed=1), RoutingRule(CHOSEN, is_normalized=True))
    rows = array_on(MEMORY, x)
    plain = table.route(None, rows, router)
    inputs = SimpleNamespace(sequence_offsets=array_on(MEMORY, np.array([0, 2, 3, 3], np.int32)))
    padded = table.route(SimpleNamespace(inputs=inputs), rows, router)
    np.testing.assert_array_equal(padded.ids.numpy()[:3], plain.ids.numpy()[:3])
    np.testing.assert_array_equal(padded.weights.numpy()[:3], plain.weights.numpy()[:3])
    assert (padded.ids.numpy()[3:] == -1).all()
    assert (padded.weights.numpy()[3:] == 0).all()

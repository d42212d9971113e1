"""Memory of adapters on a card: what is copied to it, and what it reads on the host."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from tests.adapters import TARGETS, write_adapter
from tests.paths import GOLDEN
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.card import CardAdapters
from workers.extensions.adapters.reader import AdapterFiles


class HostCard:
    """Memory of the host in place of a card's."""

    def __init__(self) -> None:
        self.num_uploaded = 0
        self.lent: list[tuple[int, int]] = []

    def arena(self, memory: np.ndarray) -> np.ndarray:
        return np.zeros_like(memory)

    def upload(self, host: np.ndarray, tensor: np.ndarray) -> None:
        tensor[...] = host
        self.num_uploaded += host.nbytes

    def lend(self, memory: np.ndarray, room: np.ndarray | None = None) -> None:
        assert room is not None
        begin = memory.ctypes.data - room.ctypes.data
        self.lent.append((begin, begin + memory.nbytes))


def test_cards_get_what_adapters_use(tmp_path: Path) -> None:
    """A slot is copied when it is first used after it was written, without its experts: these are lent if the adapter changes
    them."""
    model = GOLDEN / "qwen3_moe"
    layout = AdapterLayout.of(ModelConfig.read(model), 2, 8)
    arena, dense = AdapterArena(memoryview(mmap.mmap(-1, layout.num_bytes)), layout), layout.dense_floats
    for slot, targets in enumerate([("q_proj",), TARGETS]):
        arena.write(slot, AdapterFiles(write_adapter(tmp_path / str(slot), model, targets=targets), layout).linears())
    card = HostCard()
    adapters = CardAdapters(arena, card)
    assert (card.num_uploaded, card.lent) == (0, [(0, layout.table_bytes)])
    adapters.use(0)
    assert 0 < card.num_uploaded < 4 * dense
    assert card.lent[1:] == []
    adapters.use(1)
    end = layout.num_bytes
    assert card.lent[1:] == [(end - 4 * (layout.slot_floats - dense), end)]
    assert all(place % mmap.PAGESIZE == 0 for span in card.lent for place in span)
    np.testing.assert_array_equal(adapters.slots, arena.slots[:, :dense])
    np.testing.assert_array_equal(adapters.ranks, arena.ranks)
    num_uploaded = card.num_uploaded
    adapters.use(0)
    assert card.num_uploaded == num_uploaded
    arena.release(0)
    arena.write(0, AdapterFiles(write_adapter(tmp_path / "2", model, targets=("q_proj",), seed=2), layout).linears())
    adapters.use(0)
    np.testing.assert_array_equal(adapters.slots, arena.slots[:, :dense])
    np.testing.assert_array_equal(adapters.ranks, arena.ranks)

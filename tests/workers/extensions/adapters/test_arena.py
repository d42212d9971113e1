"""Memory of adapters: what of it a card is lent."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from tests.adapters import TARGETS, write_adapter
from tests.paths import GOLDEN
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.reader import AdapterFiles


def test_cards_are_lent_what_adapters_use(tmp_path: Path) -> None:
    """A slot when it is used, and the memory of its experts only if the adapter changes them: it has none otherwise."""
    model = GOLDEN / "qwen3_moe"
    layout = AdapterLayout.of(ModelConfig.read(model), 2, 8)
    arena = AdapterArena(memoryview(mmap.mmap(-1, layout.num_bytes)), layout)
    for slot, targets in enumerate([("q_proj",), TARGETS]):
        adapter = write_adapter(tmp_path / str(slot), model, targets=targets)
        arena.write(slot, AdapterFiles(adapter, layout).linears())
    arena.use(0)
    lent: list[tuple[int, int]] = []

    def lend(part: np.ndarray, whole: np.ndarray) -> None:
        begin = part.ctypes.data - whole.ctypes.data
        lent.append((begin, begin + part.nbytes))

    arena.lend_to(lend)
    arena.use(-1)
    assert lent == [(0, layout.table_bytes)]
    of_slot = [layout.table_bytes + 4 * slot * layout.slot_floats for slot in range(3)]
    arena.use(1)
    experts_at = of_slot[1] + 4 * layout.dense_floats
    assert lent[1:] == [(of_slot[1], experts_at), (experts_at, of_slot[2])]
    arena.use(0)
    assert lent[3:] == [(of_slot[0], of_slot[0] + 4 * layout.dense_floats)]
    assert all(place % mmap.PAGESIZE == 0 for span in lent for place in span)

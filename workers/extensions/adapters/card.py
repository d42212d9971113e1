"""Adapters on a card: those of experts stay in host memory, which the card reads; all others are copied into its own.

Made by `AdapterArena` for the weights that are loaded, so sleep frees the memory. A slot is copied when a sequence takes it for
the first time since it was written, by any rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from engine.checkpoint.adapters.layout import AdaptedModule, AdapterLayout, whole_lines
from ops.modules import Tensor


class Card(Protocol):
    """Memory of a card (`workers/devices/cuda/device.py`)."""

    def arena(self, memory: np.ndarray) -> Any: ...

    def upload(self, host: np.ndarray, tensor: Any) -> None: ...

    def lend(self, memory: np.ndarray, room: np.ndarray | None = None) -> None: ...


class HostAdapters(Protocol):
    """Adapters in host memory (`arena.py`)."""

    layout: AdapterLayout
    words: np.ndarray
    table: np.ndarray
    ranks: np.ndarray
    num_writes: np.ndarray
    slots: np.ndarray


class CardAdapters:
    """The adapters of `arena` on `card`: `slots`, float32 [slots, floats of all linears but experts'], and `ranks`, int32
    [slots, modules]. DeviceError if the card has no room."""

    def __init__(self, arena: HostAdapters, card: Card) -> None:
        layout = arena.layout
        self._arena, self._card = arena, card
        self.slots: Tensor = card.arena(np.zeros((layout.num_slots, layout.dense_floats), np.float32))
        self.ranks: Tensor = card.arena(np.zeros_like(arena.ranks))
        self._copied = np.zeros_like(arena.num_writes)  # of each slot, when it was copied
        self._dense = [module for module in layout.modules if module.a < layout.dense_floats]
        if layout.expert_bytes:
            card.lend(arena.table, arena.words)  # experts of a slot follow when it has some

    def use(self, slot: int) -> None:
        """Prepare for rows with the adapter in `slot`. No effect if the card has it."""
        arena, num_writes = self._arena, int(self._arena.num_writes[slot])
        if self._copied[slot] == num_writes:
            return
        for module in self._dense:
            for begin, end in _spans(module, int(arena.ranks[slot, module.index])):
                self._card.upload(arena.slots[slot, begin:end], self.slots[slot][begin:end])
        self._card.upload(arena.ranks[slot], self.ranks[slot])
        if arena.ranks[slot, len(self._dense) :].any():
            self._card.lend(arena.slots[slot, arena.layout.dense_floats :], arena.words)
        self._copied[slot] = num_writes

    def use_all(self) -> None:
        """Prepare for rows with any adapter."""
        for slot in np.flatnonzero(self._copied != self._arena.num_writes):
            self.use(int(slot))


def _spans(module: AdaptedModule, rank: int) -> Iterator[tuple[int, int]]:
    """Yield where A and B of this rank are in a slot."""
    if rank:
        yield module.a, module.a + module.num_inputs * whole_lines(rank)
        yield module.b, module.b + whole_lines(module.num_outputs) * rank

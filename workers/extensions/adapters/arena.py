"""Memory of all adapters, written by one rank and read by all.

Owned by the runner, over memory that the supervisor holds (`engine/checkpoint/adapters/layout.py`), so that other ranks and
restarted ones find what one rank wrote.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from engine.checkpoint.adapters.layout import LINE, AdapterLayout, whole_lines
from engine.errors import CheckpointError
from ops.modules import AdaptedPart, Adapters, ExpertAdapters, Experts, Linear
from shm.blake2 import blake2b
from workers.extensions.adapters.card import Card, CardAdapters

if TYPE_CHECKING:
    from workers.extensions.adapters.reader import AdaptedLinear

HASH_BYTES = 32
_FREED_AT_ONCE = 16 << 20  # bytes


class AdapterArena:
    """Adapters in `memory` of `layout.num_bytes` bytes, aligned to a page."""

    def __init__(self, memory: memoryview, layout: AdapterLayout) -> None:
        self.layout = layout
        self._memory = memory
        self._card: Card | None = None
        self._on_card: CardAdapters | None = None
        self.words = words = np.frombuffer(memory, np.uint8, layout.num_bytes)
        self.table = words[: layout.table_bytes]
        count = layout.num_slots * len(layout.modules)
        self.ranks = self.table[: 4 * count].view(np.int32).reshape(layout.num_slots, -1)
        self.num_writes = self.table[4 * count : 4 * (count + layout.num_slots)].view(np.int32)  # of each slot
        self.slots = words[layout.table_bytes :].view(np.float32).reshape(layout.num_slots, -1)
        self._modules = {module.name: module for module in layout.modules}

    def keep_on(self, card: Card) -> None:
        """Let linears be computed on `card`. Pages of experts, which it reads, are never freed."""
        self._card = card

    def use(self, slot: int) -> None:
        """Prepare for rows with the adapter in `slot`, -1: none."""
        if self._on_card is not None and slot >= 0:
            self._on_card.use(slot)

    def use_experts(self) -> None:
        """Prepare for rows of sequences that other ranks have: they may use any adapter of experts."""
        if self._on_card is not None and self.layout.expert_bytes:
            self._on_card.use_all()

    def leave_card(self) -> None:
        """Free the card's memory, with the linears that use it."""
        self._on_card = None

    def bind(self, linears: Iterable[Linear], mixtures: Iterable[Experts] = ()) -> None:
        """Point each adaptable linear, and the experts of each mixture, at their part of the arena. All modules of the
        layout must be among them. DeviceError if a card has no room."""
        if self._card is not None and self._on_card is None:
            self._on_card = CardAdapters(self, self._card)
        found: set[str] = set()
        own = self._on_card or self
        for linear in linears:
            parts = self._parts_of(linear, found)  # one that is used twice is of two parts
            linear.adapters = Adapters(parts, own.slots, own.ranks) if parts else None
        for mixture in mixtures:
            mixture.adapters = self._of_experts(mixture, found)
        missing = self._modules.keys() - found
        assert not missing, f"no linears of the model: {sorted(missing)[:8]}"

    def _parts_of(self, linear: Linear, found: set[str]) -> tuple[AdaptedPart, ...]:
        parts, first = [], 0
        for name, num_outputs in zip(linear.names, linear.num_outputs, strict=True):
            module = self._modules.get(name)
            if module is not None:
                shape, own = (linear.num_inputs, num_outputs), (module.num_inputs, module.num_outputs)
                assert shape == own, f"{name} has {shape} inputs and outputs, expected {own}"
                found.add(name)
                parts.append(AdaptedPart(first, num_outputs, module.index, module.a, module.b))
            first += num_outputs
        return tuple(parts)

    def _of_experts(self, mixture: Experts, found: set[str]) -> ExpertAdapters | None:
        both = zip(mixture.gate_up, mixture.down, strict=True)
        of_each = [(self._parts_of(gate_up, found), self._parts_of(down, found)) for gate_up, down in both]
        gate_up, down = of_each[0]
        if not down:
            return None
        index_step = float_step = 0
        if len(of_each) > 1:
            index_step, float_step = of_each[1][1][0].index - down[0].index, of_each[1][1][0].a - down[0].a
        ranks = (self._on_card or self).ranks
        adapters = ExpertAdapters(gate_up, down, index_step, float_step, self.slots, ranks)
        for expert, (own_gate_up, own_down) in enumerate(of_each):
            assert adapters.of("gate_up", expert).parts == own_gate_up, f"{mixture.name}: expert {expert} is elsewhere"
            assert adapters.of("down", expert).parts == own_down, f"{mixture.name}: expert {expert} is elsewhere"
        return adapters

    def release(self, slot: int) -> None:
        """Free the memory of the experts of a slot that no row uses; it then has no adapter."""
        self.ranks[slot] = 0
        layout, mapping = self.layout, self._memory.obj
        begin = layout.table_bytes + 4 * (slot * layout.slot_floats + layout.dense_floats)
        end = layout.table_bytes + 4 * (slot + 1) * layout.slot_floats
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if not isinstance(mapping, mmap.mmap) or self._card is not None:
            return
        with contextlib.suppress(OSError):  # gVisor cannot; the memory is then used again by the next adapter
            for part in range(begin, end, _FREED_AT_ONCE):  # Python keeps its lock meanwhile, and steps wait for that
                mapping.madvise(mmap.MADV_REMOVE, part, min(_FREED_AT_ONCE, end - part))

    def write(self, slot: int, linears: Iterable[AdaptedLinear]) -> str:
        """Write an adapter into a slot that no row uses; return a digest of its numbers, in hexadecimal, which does not depend
        on its files. Raises CheckpointError like the reader; the slot then has no adapter, nor memory of its experts."""
        self.ranks[slot] = 0
        try:
            ranks, contents = self._written(self.slots[slot], linears)
        except CheckpointError:
            self.release(slot)
            raise
        self.ranks[slot] = ranks
        self.num_writes[slot] += 1
        return contents

    def _written(self, memory: np.ndarray, linears: Iterable[AdaptedLinear]) -> tuple[np.ndarray, str]:
        """Return the rank of each module, and the digest."""
        digest = blake2b(digest_size=HASH_BYTES)
        ranks = np.zeros_like(self.ranks[0])
        for linear in linears:
            module, rank = linear.module, linear.rank
            room, num_panels = whole_lines(rank), whole_lines(module.num_outputs) // LINE
            a = memory[module.a : module.a + module.num_inputs * room].reshape(module.num_inputs, room)
            a[:, :rank], a[:, rank:] = linear.a.T, 0
            outputs = np.zeros((num_panels * LINE, rank), np.float32)
            outputs[: module.num_outputs] = linear.b
            b = memory[module.b : module.b + outputs.size].reshape(num_panels, rank, LINE)
            b[:] = outputs.reshape(num_panels, LINE, rank).swapaxes(1, 2)
            ranks[module.index] = rank
            digest.update(f"{module.name} {rank}\n".encode())
            digest.update(linear.a.data)
            digest.update(linear.b.data)
        return ranks, digest.hexdigest()

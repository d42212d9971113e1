"""Batch slots of a rank: the state of each running sequence between steps, which can be rebuilt from a SlotStart.

Owned by the runner. Every per-slot array is registered once, with the value of an empty slot, so that a reset covers all. Parts
of a step that not every model has keep their own arrays: a `SlotPart` registers them and fills them at each start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from engine.config import DRAFT_METHODS
from engine.messages import SlotStart
from ops import _cpu


class SlotPart(Protocol):
    """Arrays of one part of a step, registered with `BatchSlots.register`."""

    def start(self, message: SlotStart) -> None:
        """Fill the slot of a new sequence; it was reset before."""


class BatchSlots:
    """`num_slots` batch slots of at most `max_model_len` tokens each, over `block_tables` (int32 [tables, capacity + 1,
    max_blocks], of the step inputs; the last row belongs to the padded rows, not to a slot). `hidden_size`: of models that
    draft."""

    def __init__(
        self,
        block_tables: np.ndarray,
        max_model_len: int,
        vocab_size: int,
        max_drafts: int = 0,
        hidden_size: int = 0,
        sees_all: bool = False,
    ) -> None:
        self.num_slots = block_tables.shape[1] - 1
        self._sees_all = sees_all
        self.vocab_size = vocab_size
        self._registered: dict[str, tuple[np.ndarray, object]] = {}
        self._parts: list[SlotPart] = []
        # two extra places: the token sampled after the last position, and one sampled ahead after that
        self.token_ids = self.register("token_ids", 0, max_model_len + 2)
        self.num_tokens = self.register("num_tokens", 0)
        self.max_total_tokens = self.register("max_total_tokens", 0)
        self.num_prompt_tokens = self.register("num_prompt_tokens", 0)
        self.is_ended = self.register("is_ended", False, dtype=np.bool_)  # by a stop token
        # a step sampled no token, because its mask was late: rows that depend on that token are skipped
        self.is_late = self.register("is_late", False, dtype=np.bool_)
        self.num_starts = self.register("num_starts", 0, dtype=np.int64)  # sequences that used the slot so far
        by_slot = block_tables[:, : self.num_slots].swapaxes(0, 1)  # [slots, tables, max_blocks]
        self.block_tables = self._add("block_tables", by_slot, 0)
        # key bounds of the prompt's tokens if they differ from the causal ones: int32 [prompt, 2], up to `bounds_ends`
        self.mask_bounds = self.register("mask_bounds", None, dtype=object)
        self.bounds_ends = self.register("bounds_ends", 0)
        self._register_drafts(max_drafts, hidden_size)

    def _register_drafts(self, max_drafts: int, hidden_size: int) -> None:
        self.drafts = self.register("drafts", 0, max_drafts)
        self.draft_classes = self.register("draft_classes", 0, max_drafts)
        # if the earlier ones are accepted
        self.draft_chances = self.register("draft_chances", 0, max_drafts, dtype=np.float64)
        self.num_drafts = self.register("num_drafts", 0)
        # by method: probability that its drafts help
        self.draft_trusts = self.register("draft_trusts", 0, len(DRAFT_METHODS), dtype=np.float64)
        self.num_rested = self.register("num_rested", 0)  # tokens since the last drafts
        self.draft_pauses = self.register("draft_pauses", 0)  # tokens until the next drafts
        self.draft_states = self.register("draft_states", -1)  # index of the drafters' state
        # for MTP layers (`extensions/drafts/mtp.py`): the position of the trunk's hidden state, -1: none; and the entries
        # [first_entries, entry_ends) in the cache, -1: not looked up yet
        self.hidden = self.register("hidden", 0, hidden_size, dtype=np.float32)
        self.hidden_positions = self.register("hidden_positions", -1)
        self.hidden_places = self.register("hidden_places", 0)  # on a device, in the group of `draft_states`
        self.first_entries = self.register("first_entries", 0)
        self.entry_ends = self.register("entry_ends", -1)
        self.is_drafted_by_layers = self.register("is_drafted_by_layers", False, dtype=np.bool_)
        self.draft_certainties = self.register("draft_certainties", -1, max_drafts)  # by their layers' probability

    def register(self, name: str, empty: object, *shape: int, dtype: type | np.dtype = np.int32) -> np.ndarray:
        """Add an array with `shape` values per slot; `empty` is the value of an empty slot."""
        return self._add(name, np.full((self.num_slots, *shape), empty, dtype), empty)

    def _add(self, name: str, array: np.ndarray, empty: object) -> np.ndarray:
        assert name not in self._registered, name
        self._registered[name] = (array, empty)
        return array

    def add_part(self, part: SlotPart) -> None:
        """Call `part.start` at each start from now on."""
        self._parts.append(part)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every registered array, by name."""
        return ((name, array) for name, (array, _) in self._registered.items())

    def array(self, name: str) -> np.ndarray:
        """Return the array that a part registered."""
        return self._registered[name][0]

    def reset(self, slot: int) -> None:
        """Make a slot empty."""
        for array, empty in self._registered.values():
            array[slot] = empty

    def start(self, message: SlotStart) -> None:
        """Put a sequence into its slot, which is reset."""
        slot = message.slot
        assert 0 <= slot < self.num_slots, f"slot {slot} is outside the {self.num_slots} slots"
        num_starts = self.num_starts[slot]
        self.reset(slot)
        self.num_starts[slot] = num_starts + 1
        token_ids = np.frombuffer(message.token_ids, np.int32)
        is_known = (token_ids >= 0) & (token_ids < self.vocab_size)
        assert is_known.all(), f"token id {token_ids[~is_known][0]} is outside the vocabulary of {self.vocab_size}"
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_tokens[slot] = len(token_ids)
        self.num_prompt_tokens[slot] = message.num_prompt_tokens
        self.max_total_tokens[slot] = message.max_total_tokens
        self.draft_states[slot] = np.flatnonzero(~np.isin(np.arange(self.num_slots), self.draft_states))[0]
        for number, ids in enumerate((message.block_ids, *message.other_block_ids)):
            block_ids = np.frombuffer(ids, np.int32)
            self.block_tables[slot, number, : len(block_ids)] = block_ids
        if self._sees_all:
            self.mask_bounds[slot] = np.tile(np.array([0, message.num_prompt_tokens - 1], np.int32), (len(token_ids), 1))
            self.bounds_ends[slot] = message.num_prompt_tokens
        if message.mask_bounds:
            self.mask_bounds[slot] = _checked_bounds(message)
            self.bounds_ends[slot] = message.num_prompt_tokens
        for part in self._parts:
            part.start(message)

    def put_drafts(self, slots: np.ndarray, num_drafts: np.ndarray, counts: np.ndarray, num_sampled: np.ndarray) -> None:
        """Write the first num_drafts[i] drafts of slots[i] (int32 [n]) after its tokens, without counting them, and add them to
        the counts of its row."""
        num_drafts = np.ascontiguousarray(num_drafts, np.int32)
        _cpu.put_drafts(
            _cpu.address(slots),
            len(slots),
            _cpu.address(num_drafts),
            _cpu.address(counts),
            _cpu.address(num_sampled),
            _cpu.address(self.num_tokens),
            _cpu.address(self.drafts),
            self.drafts.shape[1],
            _cpu.address(self.token_ids),
            self.token_ids.shape[1],
        )

    def begin(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Record that a device samples the tokens at `positions` of `slots`; they are -1 until `finish`."""
        self.append(slots, positions, np.full(len(slots), -1, np.int32))

    def finish(self, slots: np.ndarray, num_starts: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Store the tokens of `begin`, for slots that still have the same sequence (by `num_starts`)."""
        own = self.num_starts[slots] == num_starts
        self.token_ids[slots[own], positions[own]] = token_ids[own]

    def append(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Store the tokens sampled at `positions` of `slots`, in order; a repeated step stores them again. Drafts of the slots
        are used up."""
        self.token_ids[slots, positions] = token_ids
        self.num_tokens[slots] = positions + 1
        self.num_drafts[slots] = 0


def _checked_bounds(message: SlotStart) -> np.ndarray:
    """Return the first and last key of each prompt token, int32 [prompt tokens, 2]; every token must attend to itself."""
    bounds = np.frombuffer(message.mask_bounds, np.int32).reshape(-1, 2)
    places = np.arange(message.num_prompt_tokens)
    assert len(bounds) == len(places), f"bounds of {len(bounds)} tokens for a prompt of {len(places)}"
    first, last = bounds.T
    is_right = (first >= 0) & (first <= places) & (places <= last) & (last < len(places))
    assert is_right.all(), f"token {int(np.argmin(is_right))} must attend to itself and to no key beyond the prompt"
    return bounds

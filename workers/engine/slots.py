"""The batch slots of a rank: what is kept of each running sequence between steps. Everything in it can be rebuilt from a
SlotStart.

Owned by the runner. Every per-slot array is registered once, with the value of an empty slot, so that no reset can
forget one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.config import DRAFT_METHODS
from engine.messages import SlotStart
from ops import _cpu
from workers.extensions.media.prompt_media import PromptMedia
from workers.sampling.sampling_state import SAMPLING, is_plain, record_of


class Slots:
    """`num_slots` slots of at most `max_model_len` tokens each, over `block_tables` (int32 [capacity + 1, max_blocks], the
    step inputs' own; its last row belongs to the padded rows and is no slot). `hidden_size`: of models whose layers draft."""

    def __init__(
        self,
        block_tables: np.ndarray,
        max_model_len: int,
        vocab_size: int,
        max_drafts: int = 0,
        hidden_size: int = 0,
        pooled_size: int = 0,
        sees_all: bool = False,
    ) -> None:
        self.num_slots = len(block_tables) - 1
        self._sees_all = sees_all
        self._vocab_size = vocab_size
        self._registered: dict[str, tuple[np.ndarray, object]] = {}
        # one place more: the token sampled after the last position, and one more that is sampled ahead of its end
        self.token_ids = self._register("token_ids", np.zeros((self.num_slots, max_model_len + 2), np.int32), 0)
        self.num_tokens = self._register("num_tokens", np.zeros(self.num_slots, np.int32), 0)
        self.max_total_tokens = self._register("max_total_tokens", np.zeros(self.num_slots, np.int32), 0)
        self.is_ended = self._register("is_ended", np.zeros(self.num_slots, np.bool_), False)  # by a stop token
        # a step drew no token, since its mask was late: rows that go on behind that token are left out
        self.is_late = self._register("is_late", np.zeros(self.num_slots, np.bool_), False)
        self.drafts = self._register("drafts", np.zeros((self.num_slots, max_drafts), np.int32), 0)
        self.draft_classes = self._register("draft_classes", np.zeros((self.num_slots, max_drafts), np.int32), 0)
        self.draft_chances = self._register("draft_chances", np.zeros((self.num_slots, max_drafts)), 0)  # with those before
        self.num_drafts = self._register("num_drafts", np.zeros(self.num_slots, np.int32), 0)
        trusts = np.zeros((self.num_slots, len(DRAFT_METHODS)))
        self.draft_trusts = self._register("draft_trusts", trusts, 0)  # by method asked: chance that its guesses are of use
        self.num_rested = self._register("num_rested", np.zeros(self.num_slots, np.int32), 0)  # tokens since the last drafts
        self.draft_pauses = self._register("draft_pauses", np.zeros(self.num_slots, np.int32), 0)  # tokens until the next
        self.draft_states = self._register("draft_states", np.full(self.num_slots, -1, np.int32), -1)  # which of a drafter's
        # of layers that draft (`extensions/drafts/mtp.py`): the trunk's hidden state of a position, -1: none; and the entries
        # [first_entries, entry_ends) that they have in the cache, -1: nobody has looked yet
        self.hidden = self._register("hidden", np.zeros((self.num_slots, hidden_size), np.float32), 0)
        self.hidden_positions = self._register("hidden_positions", np.full(self.num_slots, -1, np.int32), -1)
        # where it is on a device, in the group of `draft_states`
        self.hidden_places = self._register("hidden_places", np.zeros(self.num_slots, np.int32), 0)
        self.first_entries = self._register("first_entries", np.zeros(self.num_slots, np.int32), 0)
        self.entry_ends = self._register("entry_ends", np.full(self.num_slots, -1, np.int32), -1)
        self.is_drafted_by_layers = self._register("is_drafted_by_layers", np.zeros(self.num_slots, np.bool_), False)
        classes = np.full((self.num_slots, max_drafts), -1, np.int32)
        self.draft_certainties = self._register(
            "draft_certainties", classes, -1
        )  # of those that are being verified, by their layers
        self.num_prompt_tokens = self._register("num_prompt_tokens", np.zeros(self.num_slots, np.int32), 0)
        self.block_tables = self._register("block_tables", block_tables[: self.num_slots], 0)
        self.wants_prompt_logprobs = self._register("wants_prompt_logprobs", np.zeros(self.num_slots, np.bool_), False)
        self.sampling = self._register("sampling", np.zeros(self.num_slots, SAMPLING), np.zeros((), SAMPLING)[()])
        self.is_plain = self._register("is_plain", np.zeros(self.num_slots, np.bool_), False)  # as `sampling_state.is_plain`
        self.num_starts = self._register("num_starts", np.zeros(self.num_slots, np.int64), 0)  # sequences that had the slot
        self.token_lists = self._register("token_lists", np.full(self.num_slots, None, object), None)  # `sampling` points there
        self.logprob_token_ids = self._register("logprob_token_ids", np.full(self.num_slots, None, object), None)  # int32
        self.names_tokens = self._register("names_tokens", np.zeros(self.num_slots, np.bool_), False)  # whether there are any
        self.constraints = self._register("constraints", np.full(self.num_slots, None, object), None)  # with the masks there
        self.media = self._register("media", np.full(self.num_slots, None, object), None)  # PromptMedia
        self.media_ends = self._register("media_ends", np.zeros(self.num_slots, np.int32), 0)  # from here on it is text
        self.text_shifts = self._register("text_shifts", np.zeros(self.num_slots, np.int32), 0)  # added there to positions
        self.mask_bounds = self._register("mask_bounds", np.full(self.num_slots, None, object), None)  # int32 [prompt, 2]
        # of engines that pool: what is asked for, and of all tokens so far what `extensions/pooling.py` made of them
        self.pooling = self._register("pooling", np.full(self.num_slots, None, object), None)  # Pooling
        self.pooled = self._register("pooled", np.zeros((self.num_slots, pooled_size)), 0)
        self.second_starts = self._register("second_starts", np.zeros(self.num_slots, np.int32), 0)  # the prompt's end: none
        self.num_pooled = self._register("num_pooled", np.zeros(self.num_slots, np.int32), 0)
        self.adapter_slots = self._register("adapter_slots", np.full(self.num_slots, -1, np.int32), -1)  # -1: no adapter
        self.bounds_ends = self._register("bounds_ends", np.zeros(self.num_slots, np.int32), 0)  # the prompt, where it has some

    def _register(self, name: str, array: np.ndarray, empty: object) -> np.ndarray:
        assert len(array) == self.num_slots, name
        assert name not in self._registered, name
        self._registered[name] = (array, empty)
        return array

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every registered array, by name."""
        return ((name, array) for name, (array, _) in self._registered.items())

    def reset(self, slot: int) -> None:
        """Make a slot empty."""
        for array, empty in self._registered.values():
            array[slot] = empty

    def start(self, message: SlotStart) -> None:
        """Put a sequence into its slot, in place of what was there."""
        slot = message.slot
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"
        num_starts = self.num_starts[slot]
        self.reset(slot)
        self.num_starts[slot] = num_starts + 1
        token_ids = np.frombuffer(message.token_ids, np.int32)
        block_ids = np.frombuffer(message.block_ids, np.int32)
        is_known = (token_ids >= 0) & (token_ids < self._vocab_size)
        assert is_known.all(), f"token id {token_ids[~is_known][0]} of a vocabulary of {self._vocab_size}"
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_tokens[slot] = len(token_ids)
        self.num_prompt_tokens[slot] = message.num_prompt_tokens
        self.max_total_tokens[slot] = message.max_total_tokens
        self.draft_states[slot] = np.flatnonzero(~np.isin(np.arange(self.num_slots), self.draft_states))[0]
        self.block_tables[slot, : len(block_ids)] = block_ids
        self.wants_prompt_logprobs[slot] = message.wants_prompt_logprobs
        self.pooling[slot] = message.sampling.pooling
        self.sampling[slot], self.token_lists[slot] = record_of(message.sampling, self._vocab_size)
        self.is_plain[slot] = is_plain(message.sampling)
        if message.sampling.logprob_token_ids:
            self.names_tokens[slot] = True
            self.logprob_token_ids[slot] = np.array(message.sampling.logprob_token_ids, np.int32)
        media = self.media[slot] = PromptMedia.of(message)
        if media is not None:
            self.media_ends[slot], self.text_shifts[slot] = media.end, media.last_shift
        self.adapter_slots[slot] = message.adapter_slot
        self.second_starts[slot] = message.second_start or message.num_prompt_tokens
        if self._sees_all:
            self.mask_bounds[slot] = np.tile(np.array([0, message.num_prompt_tokens - 1], np.int32), (len(token_ids), 1))
            self.bounds_ends[slot] = message.num_prompt_tokens
        if message.mask_bounds:
            self.mask_bounds[slot] = _checked_bounds(message)
            self.bounds_ends[slot] = message.num_prompt_tokens

    def set_unit_rows(self, slots: np.ndarray, units: np.ndarray, rows: np.ndarray) -> None:
        """Features that units of slots have got in the encoder arena, or lost."""
        for slot, unit, row in zip(slots.tolist(), units.tolist(), rows.tolist(), strict=True):
            self.media[slot].rows[unit] = row

    def put_drafts(self, slots: np.ndarray, num_drafts: np.ndarray, counts: np.ndarray, num_sampled: np.ndarray) -> None:
        """The first num_drafts[i] drafts of slots[i] (int32 [n]) behind its tokens, which they do not count among, and added to
        the numbers of its row."""
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
        """A device draws the tokens for `positions` of `slots`, and has them there: -1 until `finish`."""
        self.append(slots, positions, np.full(len(slots), -1, np.int32))

    def finish(self, slots: np.ndarray, num_starts: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """They are these, of slots whose sequences are still those of then, by their `num_starts`. Others are begun behind."""
        own = self.num_starts[slots] == num_starts
        self.token_ids[slots[own], positions[own]] = token_ids[own]

    def append(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """The tokens sampled for `positions` of `slots`, in order; the same again where a step is run again. What was drafted
        before them is spent."""
        self.token_ids[slots, positions] = token_ids
        self.num_tokens[slots] = positions + 1
        self.num_drafts[slots] = 0
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int64)
        token_ids = np.ascontiguousarray(token_ids, np.int32)
        drawn = _cpu.address(slots), _cpu.address(positions), _cpu.address(token_ids), len(slots)
        of_slots = _cpu.address(self.sampling), _cpu.address(self.num_prompt_tokens), _cpu.address(self.is_ended)
        _cpu.find_ends(*drawn, *of_slots)


def _checked_bounds(message: SlotStart) -> np.ndarray:
    """First and last key of each prompt token, int32 [prompt tokens, 2]; a token sees itself."""
    bounds = np.frombuffer(message.mask_bounds, np.int32).reshape(-1, 2)
    places = np.arange(message.num_prompt_tokens)
    assert len(bounds) == len(places), f"bounds of {len(bounds)} tokens for a prompt of {len(places)}"
    first, last = bounds.T
    is_right = (first >= 0) & (first <= places) & (places <= last) & (last < len(places))
    assert is_right.all(), f"token {int(np.argmin(is_right))} should see itself and no key beyond the prompt"
    return bounds

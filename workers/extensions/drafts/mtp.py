"""MTP layers of the checkpoint (`workers/models/mtp.py`): when their rows run, and what is kept of a slot for them.

Called by `mtp_steps.py`, twice per step, on every rank alike; `device_mtp.py` does the same where the host has no hidden
states:

    before the trunk   `draft`: draft tokens of the rows, once their blocks are assigned. The first of a row is made from its
                       last token and the hidden state before it, which is kept per slot; each further one from the draft
                       token before it and the layer's output for that
    after it           `keep`: entries of all accepted tokens, made again from the trunk's hidden states where a draft token
                       had made them; and the last hidden state of each slot, for the next step

    position            p - 1     p         p + 1     p + 2
    tokens                        last      draft 0   draft 1     of a row that begins at p
    entry made of       ...       h(p - 1)  h'(p)     h'(p + 1)   by `draft`
                                            h(p)      h(p + 1)    by `keep`, as far as the drafts are accepted

A row without drafting is skipped, which leaves a hole; attention reads only entries after the last hole. The layer's
probability of its own draft token is known only after the draft lengths are chosen. Acceptance rates are therefore learned by
that probability and the place in the chain (ops/cpu/native/draft_tokens.h), and end unlikely chains early. Which entries exist
is tracked natively (ops/cpu/native/layer_drafts.h); with a tape, whole chains of draft tokens are native too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.checkpoint.comm_spec import max_rows
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.messages import Step
from ops import _cpu
from ops.cpu.rank_group import RankGroup
from ops.modules import KvCache
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.captures import Phase, StepMode
from workers.engine.inputs import StepInputs
from workers.engine.plan import Plan
from workers.engine.row_inputs import Room
from workers.engine.rows import StepRows
from workers.extensions.drafts.draft_inputs import DraftInputs
from workers.extensions.drafts.draft_plan import DraftPlan, TapeDraftPlan, make_draft_plan
from workers.extensions.drafts.drafter import Drafts
from workers.models import Model


def likeliest(logits: np.ndarray) -> np.ndarray:
    """Return the likeliest tokens, int32 [n]. They are accepted most often, at temperatures from 0 to 1.5; tokens sampled with
    the random numbers of their positions, like the trunk's, were accepted less often (tools/bench/peers.md)."""
    token_ids: np.ndarray = logits.argmax(axis=1).astype(np.int32)
    return token_ids


class MtpDrafter:
    """Inputs of the MTP layers and their state of each slot. Its proposals have no tokens yet: `draft` writes those for the
    chosen slots."""

    needs_hidden = True
    has_draft_tokens = False  # of the step; only the device knows them

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: Device,
        inputs: StepInputs,
        slots: BatchSlots,
        cache: KvCache,
        marks: np.ndarray,
        on_op: Callable[[], None] = lambda: None,
        rank_group: RankGroup | None = None,
    ) -> None:
        """`marks`: bool [blocks, block size], whether the entry of each position exists, since a cached prefix may have holes.
        They are in the arena and outlive the worker."""
        self._slots = slots
        self._cache = cache
        self._loaded_plan: DraftPlan | None = None
        self._config = config
        self._device = device
        self._on_op, self._rank_group = on_op, rank_group
        seats = config.max_num_seqs
        # captured numbers of sequences; a step of a captured size has at most that many sequences, or one per row
        num_rows = 1 + config.speculative_config.num_speculative_tokens
        sizes = {min(seats, size) for each in config.cudagraph_capture_sizes for size in (each, each // num_rows)}
        self._sizes = () if config.graph_only_prefill else tuple(sorted(sizes, reverse=True))
        self._mode = StepMode(Phase.NONE, 0)  # of the last step
        self._make_inputs(model, inputs)
        num_drafts = config.speculative_config.max_drafts
        # one class per place after the last token, and separate ones for slots with few entries, which are less predictable
        self.priors = np.outer([0.7, 0.3], 0.9 ** np.arange(num_drafts)).ravel()
        self._found = Drafts.empty(seats, num_drafts)
        self._marks = marks
        # where chains end: acceptance rates by place and class of the layer's own probability, if all earlier drafts are
        # accepted; and the probability from which a draft pays, with those before it
        self.ends = np.zeros(num_drafts * _cpu.DraftChances.NUM_CLASSES + 1)
        self._chances, self._least_chance = self.ends[:-1], self.ends[-1:]
        self._layers = self._make_native()

    def _make_inputs(self, model: ModelConfig, inputs: StepInputs) -> None:
        seats, row_tile = self._config.max_num_seqs, self._device.ops.row_tile
        num_tables = len(inputs.block_tables)
        room = Room(seats, max_rows(self._config.max_num_batched_tokens, seats), row_tile, num_tables=num_tables)
        self._accepted = DraftInputs(self._device, room, inputs.block_tables, model.hidden_size)
        single = Room(seats, max_rows(0, seats), row_tile, max(self._sizes, default=0), num_tables=num_tables)
        self._single = DraftInputs(self._device, single, inputs.block_tables, model.hidden_size)

    def _inputs_of_tapes(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Return the addresses that `LayerDrafts` takes."""
        return self._accepted.host_addresses(), self._single.host_addresses(), self._single.max_logit_rows

    def _make_native(self) -> _cpu.LayerDrafts:
        slots = self._slots
        of_tokens = "token_ids", "num_tokens", "max_total_tokens", "num_prompt_tokens", "is_ended"
        of_layers = "hidden", "hidden_positions", "first_entries", "entry_ends", "is_drafted_by_layers", "draft_certainties"
        arrays = {name: getattr(slots, name) for name in (*of_tokens, *of_layers)}
        arrays |= {"marks": self._marks, "block_tables": slots.block_tables[:, 0]}
        places = {name: _cpu.address(array) for name, array in arrays.items()}
        widths = slots.token_ids.shape[1], slots.block_tables.shape[2], self._config.block_size, slots.hidden.shape[1]
        found = self._found.token_ids.shape[1], _cpu.address(self._chances), _cpu.address(self._least_chance)
        return _cpu.LayerDrafts(places, *widths, *self._inputs_of_tapes(), *found)

    @property
    def num_bytes(self) -> int:
        """Return 0: entries are in the KV arena, hidden states in the slots."""
        return 0

    # ------------------------------------------------------------------------------------------------------ weights

    def load(self, model: Model) -> None:
        """Use the layers of `model`."""
        self._loaded_plan = make_draft_plan(
            self._config.plan,
            model.drafts,
            self._device,
            self._accepted,
            self._single,
            self._cache,
            self._on_op,
            self._rank_group,
            self._sizes,
        )
        if isinstance(self._plan, TapeDraftPlan):
            self._layers.set_tapes(*self._plan.tapes())

    @property
    def _plan(self) -> DraftPlan:
        assert self._loaded_plan is not None, "weights are not loaded"
        return self._loaded_plan

    @property
    def num_uncaptured(self) -> int:
        """Return how many graphs the device could not capture."""
        return 0 if self._loaded_plan is None else self._loaded_plan.num_failed

    def clear(self) -> None:
        """Release the weights."""
        self._layers.clear_tapes()
        self._loaded_plan = None

    # ------------------------------------------------------------------------------------------------------- draft tokens

    def expect(self, least_chance: float) -> None:
        """End chains at draft tokens with an acceptance rate below this; 0: make all chosen drafts."""
        self._least_chance[0] = least_chance

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None:
        """Do nothing: all state is in `slots`."""

    def stop(self, slot: int, token_ids: np.ndarray) -> None:
        """Do nothing: no state is kept."""

    def known(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Do nothing: `keep` did it."""

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Drafts:
        """Propose as many as allowed where the hidden state before the last token is known."""
        found, count = self._found, len(slots)
        places = _cpu.address(found.counts), _cpu.address(found.classes)
        self._layers.propose(_cpu.address(slots), count, _cpu.address(limits), found.classes.shape[1], *places)
        return Drafts(found.token_ids[:count], found.counts[:count], found.classes[:count])

    def forget(self) -> None:
        """Do nothing: blocks of ended sequences are no longer found."""

    def forget_captures(self) -> None:
        """Drop the captured graphs, which are captured again."""
        if self._loaded_plan is not None:
            self._loaded_plan.forget()

    def warm_up(self) -> None:
        """Replay every graph once, on padded rows that write only the dummy block."""
        none = np.zeros(0, np.int32)
        for size in self._sizes:
            self._single.set_rows(none, none, none, self._slots.token_ids, none)
            self._single.pad(size)
            for module in range(self._plan.num_modules):
                self._plan.forward(module, size)

    def _forward(self, module: int, mode: StepMode) -> None:
        """Run on the rows that are set, padded to a captured size if the model's rows are."""
        size = self._size_of(self._single.num_tokens, mode)
        if size:
            self._single.pad(size)
        self._plan.forward(module, size)

    def _size_of(self, num_rows: int, mode: StepMode) -> int:
        return min((size for size in self._sizes if size >= num_rows), default=0) if mode.size else 0

    def prepare(self, rows: StepRows, mode: StepMode, are_drafting: np.ndarray) -> None:
        """Prepare drafting, before the step's inputs are set. `mode`: of the step; `are_drafting`: result of that function."""
        self.draft(rows, mode)

    def draft_on_device(self) -> None:
        """Enqueue the draft tokens after the step's inputs are set and before they are read. On the host they already exist."""

    def fetch_draft_tokens(self) -> None:
        """Copy draft tokens to the slots if only the device has them."""

    def store(self, plan: Plan, mode: StepMode) -> None:
        """Store hidden states on the device after the trunk ran. On the host `keep` makes the entries."""

    def draft(self, rows: StepRows, mode: StepMode, choose: Callable[[np.ndarray], np.ndarray] = likeliest) -> None:
        """Write draft tokens after the last tokens of the rows that verify some. `mode`: of the step; `choose`: draft tokens by
        logits [n, vocab]. Chains on a tape end at a draft token that is unlikely by its own probability, and the rows then have
        fewer drafts. Captured or eager chains have the chosen length."""
        self._mode = mode
        is_drafting = (rows.num_drafts > 0) & self._slots.is_drafted_by_layers[rows.slots]
        if not is_drafting.any():
            return
        plan = self._plan
        if isinstance(plan, TapeDraftPlan) and not mode.size and choose is likeliest:
            plan.chain(self._layers, rows)
            return
        slots, starts, counts = rows.slots[is_drafting], rows.starts[is_drafting], rows.num_drafts[is_drafting]
        token_ids = self._slots.token_ids
        hidden = self._slots.hidden[slots]
        first_keys = self._enter(slots, starts, starts + 1)
        for number in range(int(counts.max())):
            still = counts > number
            if not still.all():
                slots, starts, counts, first_keys = slots[still], starts[still], counts[still], first_keys[still]
                hidden = hidden[still]
            positions = starts + number
            self._single.host_hidden[: len(slots)] = hidden
            self._single.set_rows(slots, positions, np.ones_like(slots), token_ids, first_keys)
            module = number % plan.num_modules
            self._forward(module, mode)
            if number == 0:
                self._mark(slots, starts, starts + 1)
            hidden = plan.fed(module)[: len(slots)].copy()
            for begin in range(0, len(slots), self._single.max_logit_rows):
                part = slice(begin, min(begin + self._single.max_logit_rows, len(slots)))
                self._single.set_logit_rows(np.arange(part.start, part.stop))
                token_ids[slots[part], positions[part] + 1] = choose(plan.logits(module)[: part.stop - begin])

    # ------------------------------------------------------------------------------------------------ accepted tokens

    def are_drafting(self, rows: StepRows, wants_drafts: bytes) -> np.ndarray:
        """Return which rows get entries for their tokens, bool [n]: those that verify drafts, would with more room in the step,
        or may once their prompt is computed. `wants_drafts`: that of the Step. Called before chains end; as each keeps one
        draft token at least, the rows that verify some do not change."""
        are_drafting = np.empty(len(rows.slots), np.bool_)
        is_wanted = _cpu.address(wants_drafts) if wants_drafts else 0
        self._layers.choose(*rows.addresses(), is_wanted, _cpu.address(are_drafting))
        return are_drafting

    def keep(self, rows: StepRows, counts: np.ndarray, is_drafting: np.ndarray, kept_ends: np.ndarray, plan: Plan) -> None:
        """Make entries of the accepted tokens of a step, counts[i] of row i, where `is_drafting`, and keep the last hidden
        state. `plan` has the hidden states of the kept rows; those of row i end at kept_ends[i]: of all its positions if it is
        drafting, else of those that sample."""
        slots, firsts, num_entries, first_keys = self._take(rows, counts, is_drafting, kept_ends, plan.hidden())
        if len(slots):  # otherwise a plan without tapes
            self._accepted.set_rows(slots, firsts, num_entries, self._slots.token_ids, first_keys)
            self._plan.store()
            self._mark(slots, firsts, firsts + num_entries)

    def _take(
        self, rows: StepRows, counts: np.ndarray, is_drafting: np.ndarray, kept_ends: np.ndarray, hidden: np.ndarray
    ) -> list[np.ndarray]:
        """Return rows whose entries are to be made: slots, first positions, numbers of entries, first keys; int32 [n] each."""
        hidden = np.ascontiguousarray(hidden)
        kept_ends = np.ascontiguousarray(kept_ends, np.int64)
        arrays = _cpu.address(counts), _cpu.address(is_drafting), _cpu.address(kept_ends), _cpu.address(hidden)
        return [np.array(each, np.int32) for each in self._layers.keep(*rows.addresses(), *arrays)]

    # ------------------------------------------------------------------------------------------------- what there is

    def begin(self, rows: StepRows, step: Step) -> None:
        """Update entries before a step that assigns blocks to slots. A sequence in its first row has the entries of its cached
        prefix after the last hole. Position 0 has none, because no hidden state comes before it. Later positions have none
        until they are made, whatever the blocks contained."""
        if step.starts:
            self._layers.begin(*rows.addresses())
        for start in step.starts:
            indexes = np.arange(len(start.block_ids) // np.int32().nbytes, dtype=np.int32)
            self._empty(np.full_like(indexes, start.slot), indexes)
        if step.block_slots:  # entries are marked in the blocks of the first table
            slots, indexes = np.frombuffer(step.block_slots, np.int32), np.frombuffer(step.block_indexes, np.int32)
            is_first = np.frombuffer(step.block_tables, np.int32) == 0 if step.block_tables else np.ones(len(slots), np.bool_)
            self._empty(np.ascontiguousarray(slots[is_first]), np.ascontiguousarray(indexes[is_first]))

    def _empty(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """Clear the marks of these blocks of the slots' tables, except for cached ones."""
        self._layers.empty(_cpu.address(slots), _cpu.address(blocks), len(slots))

    def _enter(self, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Record that entries [begins[i], ends[i]) will exist; return the first existing entry of each slot."""
        first_entries = np.empty_like(begins)
        self._layers.enter(*_places(slots, begins, ends), _cpu.address(first_entries))
        return first_entries

    def _mark(self, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        """Mark the entries [begins[i], ends[i])."""
        self._layers.mark(*_places(slots, begins, ends))


def _places(slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[int, int, int, int]:
    return _cpu.address(slots), len(slots), _cpu.address(begins), _cpu.address(ends)

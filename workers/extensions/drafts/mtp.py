"""Layers of the checkpoint that draft further tokens (`workers/models/mtp.py`): when which of their rows are run, and what is
kept of a slot for them.

Called by `mtp_steps.py`, twice a step, on every rank alike; `device_mtp.py` does the same where the host sees no hidden state:

    before the trunk   `draft`: the rows' draft tokens, when the blocks that they need are there. The first of a row is made of
                       its last token and the hidden state before it, which is kept per slot; each further one of the draft
                       token before and of what the layer gave for it
    after it           `keep`: entries of all accepted tokens, anew from the trunk's hidden states where a draft token had made
                       them; and the last hidden state of each slot, for the next step

    position            p - 1     p         p + 1     p + 2
    tokens                        last      draft 0   draft 1     of a row that begins at p
    entry made of       ...       h(p - 1)  h'(p)     h'(p + 1)   by `draft`
                                            h(p)      h(p + 1)    by `keep`, as far as the drafts are accepted

A row that is not to be drafted for is skipped, which leaves a hole; attention sees what lies behind the last one. How likely a
layer finds its own draft token is known when that is made, behind the choice of how many there are to be: chances are learned
by it and by the place in the chain (ops/cpu/native/draft_tokens.h), and end chains early. Which entries there are is native
(ops/cpu/native/layer_drafts.h), and so are whole chains of draft tokens where the plan is a tape.
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
    """Return the draft tokens that are accepted most often, at temperatures from 0 to 1.5: drawn with the numbers of their
    positions, as the trunk draws, fewer of them did (tools/bench/peers.md). int32 [n]."""
    token_ids: np.ndarray = logits.argmax(axis=1).astype(np.int32)
    return token_ids


class MtpDrafter:
    """The layers' inputs and what they have of each slot. What it proposes has no tokens yet: `draft` puts them behind those
    of the slots for which it was chosen."""

    needs_hidden = True
    has_draft_tokens = False  # of the step, that only the device knows

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
        """`marks`: bool [blocks, block size], of each position whether its entry is there: a prefix that is found may have
        holes. They are in the arena, and outlive the worker."""
        self._slots = slots
        self._cache = cache
        self._plan: DraftPlan | None = None
        self._config = config
        self._device = device
        self._on_op, self._rank_group = on_op, rank_group
        seats = config.max_num_seqs
        # what was captured with so many sequences; a step of one size of these has that many at most, or one for each row
        num_rows = 1 + config.speculative_config.num_speculative_tokens
        sizes = {min(seats, size) for each in config.cudagraph_capture_sizes for size in (each, each // num_rows)}
        self._sizes = () if config.graph_only_prefill else tuple(sorted(sizes, reverse=True))
        self._mode = StepMode(Phase.NONE, 0)  # of the last step
        self._make_inputs(model, inputs)
        num_drafts = config.speculative_config.max_drafts
        # a class for each place behind the last token; others for slots with few entries, which say little of it
        self.priors = np.outer([0.7, 0.3], 0.9 ** np.arange(num_drafts)).ravel()
        self._found = Drafts.empty(seats, num_drafts)
        self._marks = marks
        # where chains end: by place and class of a draft token's own probability the chance that it is accepted, where
        # those before it are; and from which chance on it pays, with those before it
        self.ends = np.zeros(num_drafts * _cpu.DraftChances.NUM_CLASSES + 1)
        self._chances, self._least_chance = self.ends[:-1], self.ends[-1:]
        self._layers = self._make_native()

    def _make_inputs(self, model: ModelConfig, inputs: StepInputs) -> None:
        seats, row_tile = self._config.max_num_seqs, self._device.ops.row_tile
        room = Room(seats, max_rows(self._config.max_num_batched_tokens, seats), row_tile)
        self._accepted = DraftInputs(self._device, room, inputs.block_tables, model.hidden_size)
        single = Room(seats, max_rows(0, seats), row_tile, max(self._sizes, default=0))
        self._single = DraftInputs(self._device, single, inputs.block_tables, model.hidden_size)

    def _inputs_of_tapes(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Return the addresses that `LayerDrafts` takes."""
        return self._accepted.host_addresses(), self._single.host_addresses(), self._single.max_logit_rows

    def _make_native(self) -> _cpu.LayerDrafts:
        slots = self._slots
        of_tokens = "token_ids", "num_tokens", "max_total_tokens", "num_prompt_tokens", "block_tables", "is_ended"
        of_layers = "hidden", "hidden_positions", "first_entries", "entry_ends", "is_drafted_by_layers", "draft_certainties"
        arrays = {name: getattr(slots, name) for name in (*of_tokens, *of_layers)}
        places = {name: _cpu.address(array) for name, array in (arrays | {"marks": self._marks}).items()}
        widths = slots.token_ids.shape[1], slots.block_tables.shape[1], self._config.block_size, slots.hidden.shape[1]
        found = self._found.token_ids.shape[1], _cpu.address(self._chances), _cpu.address(self._least_chance)
        return _cpu.LayerDrafts(places, *widths, *self._inputs_of_tapes(), *found)

    @property
    def num_bytes(self) -> int:
        """Entries are in the KV arena, hidden states in the slots."""
        return 0

    # ------------------------------------------------------------------------------------------------------ weights

    def load(self, model: Model) -> None:
        """Go on with the layers of `model`."""
        self._plan = make_draft_plan(
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
    def num_uncaptured(self) -> int:
        """Graphs that the device could not capture."""
        return 0 if self._plan is None else self._plan.num_failed

    def clear(self) -> None:
        """Let go of the weights."""
        self._layers.clear_tapes()
        self._plan = None

    # ------------------------------------------------------------------------------------------------------- draft tokens

    def expect(self, least_chance: float) -> None:
        """From now on chains end at draft tokens with less than this chance to be accepted; 0: all are made that were
        chosen."""
        self._least_chance[0] = least_chance

    def start(self, slot: int, token_ids: np.ndarray, num_prompt_tokens: int, prediction: np.ndarray) -> None:
        """Everything of it is in `slots`."""

    def stop(self, slot: int, token_ids: np.ndarray) -> None:
        """Nothing is kept of it."""

    def known(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """`keep` has seen to it."""

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Drafts:
        """Propose as many as are allowed wherever the hidden state before the last token is at hand."""
        found, count = self._found, len(slots)
        places = _cpu.address(found.counts), _cpu.address(found.classes)
        self._layers.propose(_cpu.address(slots), count, _cpu.address(limits), found.classes.shape[1], *places)
        return Drafts(found.token_ids[:count], found.counts[:count], found.classes[:count])

    def forget(self) -> None:
        """The blocks of sequences that are gone are found no more."""

    def cool(self) -> None:
        """Drop the captures, which are made again."""
        if self._plan is not None:
            self._plan.forget()

    def warm_up(self) -> None:
        """Replay what was captured once: padded rows alone, so nothing but the dummy block is written."""
        assert self._plan is not None, "a plan comes with the weights"
        none = np.zeros(0, np.int32)
        for size in self._sizes:
            self._single.set_rows(none, none, none, self._slots.token_ids, none)
            self._single.pad(size)
            for module in range(self._plan.num_modules):
                self._plan.forward(module, size)

    def _forward(self, module: int, mode: StepMode) -> None:
        """With the rows that are set, padded to what was captured for as many iff the model is."""
        assert self._plan is not None, "a plan comes with the weights"
        size = self._size_of(self._single.num_tokens, mode)
        if size:
            self._single.pad(size)
        self._plan.forward(module, size)

    def _size_of(self, num_rows: int, mode: StepMode) -> int:
        return min((size for size in self._sizes if size >= num_rows), default=0) if mode.size else 0

    def prepare(self, rows: StepRows, mode: StepMode, are_drafting: np.ndarray) -> None:
        """Before the step's inputs are set. `mode`: of the step; `are_drafting`: as the function says."""
        self.draft(rows, mode)

    def draft_on_device(self) -> None:
        """Enqueue the draft tokens once the step's inputs are set, before they are read. The host's are there by then."""

    def tell(self) -> None:
        """Put draft tokens among the slots' tokens, where the device alone has them."""

    def store(self, plan: Plan, mode: StepMode) -> None:
        """When the trunk has been run: entries are made by `keep`."""

    def draft(self, rows: StepRows, mode: StepMode, choose: Callable[[np.ndarray], np.ndarray] = likeliest) -> None:
        """Put draft tokens behind the last tokens of the rows that verify some of it. `mode`: of the step; `choose`:
        draft tokens by logits [n, vocab]. Chains of tapes end at a draft token that is hardly accepted, by its own probability:
        rows have fewer drafts then. What is captured, or made op by op, has as many as were chosen."""
        self._mode = mode
        is_drafting = (rows.num_drafts > 0) & self._slots.is_drafted_by_layers[rows.slots]
        if not is_drafting.any():
            return
        assert self._plan is not None, "a plan comes with the weights"
        if isinstance(self._plan, TapeDraftPlan) and not mode.size and choose is likeliest:
            self._plan.chain(self._layers, rows)
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
            module = number % self._plan.num_modules
            self._forward(module, mode)
            if number == 0:
                self._mark(slots, starts, starts + 1)
            hidden = self._plan.fed(module)[: len(slots)].copy()
            for begin in range(0, len(slots), self._single.max_logit_rows):
                part = slice(begin, min(begin + self._single.max_logit_rows, len(slots)))
                self._single.set_logit_rows(np.arange(part.start, part.stop))
                token_ids[slots[part], positions[part] + 1] = choose(self._plan.logits(module)[: part.stop - begin])

    # ------------------------------------------------------------------------------------------------ accepted tokens

    def are_drafting(self, rows: StepRows, wants_drafts: bytes) -> np.ndarray:
        """Which rows' tokens get entries, bool [n]: those that verify draft tokens, or would with more room in the step, or may
        when their prompt is computed. `wants_drafts`: that of the Step. Asked before chains end: each keeps a draft token at
        least, so those that verify some are the same afterwards."""
        are_drafting = np.empty(len(rows.slots), np.bool_)
        is_wanted = _cpu.address(wants_drafts) if wants_drafts else 0
        self._layers.choose(*rows.addresses(), is_wanted, _cpu.address(are_drafting))
        return are_drafting

    def keep(self, rows: StepRows, counts: np.ndarray, is_drafting: np.ndarray, kept_ends: np.ndarray, plan: Plan) -> None:
        """Make entries of the accepted tokens of a step, counts[i] of row i, where `is_drafting`, and keep the last hidden
        state. `plan` has the hidden states of the kept rows; those of row i end at kept_ends[i]: of all its positions where it
        is drafting, else of those that sample."""
        slots, firsts, num_entries, first_keys = self._take(rows, counts, is_drafting, kept_ends, plan.hidden())
        if len(slots):  # the plan is no tape
            assert self._plan is not None, "a plan comes with the weights"
            self._accepted.set_rows(slots, firsts, num_entries, self._slots.token_ids, first_keys)
            self._plan.store()
            self._mark(slots, firsts, firsts + num_entries)

    def _take(
        self, rows: StepRows, counts: np.ndarray, is_drafting: np.ndarray, kept_ends: np.ndarray, hidden: np.ndarray
    ) -> list[np.ndarray]:
        """Rows whose entries are to be made: slots, first positions, numbers of these, first keys; int32 [n] each."""
        hidden = np.ascontiguousarray(hidden)
        kept_ends = np.ascontiguousarray(kept_ends, np.int64)
        told = _cpu.address(counts), _cpu.address(is_drafting), _cpu.address(kept_ends), _cpu.address(hidden)
        return [np.array(each, np.int32) for each in self._layers.keep(*rows.addresses(), *told)]

    # ------------------------------------------------------------------------------------------------- what there is

    def begin(self, rows: StepRows, step: Step) -> None:
        """Before anything of a step that gives blocks to slots. In those whose first row it is entries are there from the last
        hole on of the prefix that was found, if any. Position 0 has none: no hidden state is before it. Behind them there are
        none until they are made, whatever the blocks had before."""
        if step.starts:
            self._layers.begin(*rows.addresses())
        for start in step.starts:
            indexes = np.arange(len(start.block_ids) // np.int32().nbytes, dtype=np.int32)
            self._empty(np.full_like(indexes, start.slot), indexes)
        if step.block_slots:
            self._empty(np.frombuffer(step.block_slots, np.int32), np.frombuffer(step.block_indexes, np.int32))

    def _empty(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        """No entries are in these blocks of the slots' tables, but those that were found."""
        self._layers.empty(_cpu.address(slots), _cpu.address(blocks), len(slots))

    def _enter(self, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Entries [begins[i], ends[i]) will be there; the first that there is then of each slot."""
        first_entries = np.empty_like(begins)
        self._layers.enter(*_places(slots, begins, ends), _cpu.address(first_entries))
        return first_entries

    def _mark(self, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        """The entries [begins[i], ends[i]) are there."""
        self._layers.mark(*_places(slots, begins, ends))


def _places(slots: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[int, int, int, int]:
    return _cpu.address(slots), len(slots), _cpu.address(begins), _cpu.address(ends)

"""MTP layers on a device that makes the inputs of a step itself: like `mtp.py`, but neither draft tokens nor hidden states pass
through the host, and there is no extra copy or wait.

Chosen by `drafting.mtp_kind`. A step, in the order in which it is enqueued:

    the host    knows all accepted tokens and where the hidden state of each slot is; writes into the step's one buffer which
                rows get draft tokens and which rows get entries (`prepare`)
    the device  receives that buffer; drafts, and writes each draft token after its slot's tokens (`draft_on_device`);
                runs the trunk on these inputs, and samples; returns the sampled tokens and those that its rows read,
                in one copy; writes entries of all rows and keeps their last hidden states (`store`)
    the host    compares sampled and draft tokens: which entries exist, and which hidden state counts (`keep`)
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint.comm_spec import max_logit_rows, max_rows
from engine.checkpoint.model_config import ModelConfig
from ops.layer_rows import NO_ENTRIES, OF_DRAFTS, OF_ENTRIES, LayerMemory, LayerSizes
from ops.table import KEY_SPLIT, ROW_TILE
from workers.engine.captures import StepMode
from workers.engine.device_inputs import DeviceInputs
from workers.engine.eager_plan import EagerPlan
from workers.engine.inputs import StepInputs
from workers.engine.plan import Plan, telling
from workers.engine.rows import StepRows
from workers.extensions.drafts.device_draft_plan import DeviceDraftPlan
from workers.extensions.drafts.mtp import MtpDrafter
from workers.models import Model

_NO_STATES = np.zeros((0, 0), np.float32)


class DeviceMtpDrafter(MtpDrafter):
    def _make_inputs(self, model: ModelConfig, inputs: StepInputs) -> None:
        assert isinstance(inputs, DeviceInputs)
        config, device = self._config, self._device
        seats, num_drafts = config.max_num_seqs, config.speculative_config.max_drafts
        self._inputs = inputs
        self._device_plan: DeviceDraftPlan | None = None
        # slots with draft tokens, positions of their last tokens, numbers of draft tokens; longest first
        self._drafted = (np.zeros(0, np.int32),) * 3
        self._max_key_splits = -(-config.max_model_len // KEY_SPLIT)
        most, group = max_rows(0, seats), 1 + num_drafts
        draft_tokens = np.zeros((OF_DRAFTS, most), np.int32)
        draft_tokens[0], draft_tokens[4] = seats, seats * group  # the dummy slot and its hidden state, which is 0
        entries = np.zeros((OF_ENTRIES, seats), np.int32)
        entries[0], entries[1] = NO_ENTRIES, seats * group
        columns = inputs.reserve(np.concatenate([draft_tokens.ravel(), entries.ravel()]))
        self._draft_tokens = inputs.beside[: draft_tokens.size].reshape(draft_tokens.shape)
        self._entries = inputs.beside[draft_tokens.size :].reshape(entries.shape)
        sizes = LayerSizes(most, group, inputs.padded(max(config.cudagraph_capture_sizes, default=0)), model.hidden_size)
        assert device.ops.layer_memory is not None, f"{device.ops.name} ops have inputs of the host"
        self._memory: LayerMemory = device.ops.layer_memory(inputs, columns, sizes)
        inputs.layers = self._memory
        rows = max_logit_rows(most, seats, 0) // ROW_TILE * ROW_TILE
        self._max_logit_rows = max(rows, ROW_TILE)

    def _inputs_of_tapes(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Return no addresses: the device has no tapes."""
        names = ("token_ids", "row_slots", "positions", "sequence_slots", "sequence_offsets", "sequence_starts")
        none = dict.fromkeys((*names, "first_keys", "last_keys", "logit_row_ids", "hidden", "counts"), 0)
        return none, none, 0

    @property
    def _layers_plan(self) -> DeviceDraftPlan:
        assert self._device_plan is not None, "weights are not loaded"
        return self._device_plan

    def load(self, model: Model) -> None:
        ops = telling(self._device.ops, self._on_op)
        self._device_plan = DeviceDraftPlan(
            model.drafts, self._device, ops, self._memory, self._inputs, self._cache, self._max_logit_rows
        )

    @property
    def num_uncaptured(self) -> int:
        return 0 if self._device_plan is None else self._device_plan.num_failed

    def clear(self) -> None:
        self._device_plan = None

    def forget_captures(self) -> None:
        if self._device_plan is not None:
            self._device_plan.forget()

    def warm_up(self) -> None:
        """Capture drafting for each size; `store` was already called with each size of the trunk. The last step has no rows."""
        for size in self._sizes:
            for number in range(self._memory.sizes.group - 1):
                self._layers_plan.draft(number, self._inputs.padded(size), self._max_key_splits, size)

    def prepare(self, rows: StepRows, mode: StepMode, are_drafting: np.ndarray) -> None:
        slots, group = self._slots, self._memory.sizes.group
        self._mode = mode
        states = slots.draft_states[rows.slots] * group + slots.hidden_places[rows.slots]
        are_drafted = (rows.num_drafts > 0) & slots.is_drafted_by_layers[rows.slots]
        # the entry of the first token is made together with its first draft token; without drafts, with the other entries, if
        # the hidden state before it is known
        have_first = ~are_drafted & (rows.starts > 0) & (slots.hidden_positions[rows.slots] == rows.starts - 1)
        firsts = rows.starts + ~have_first
        self._entries[:, : len(states)] = np.where(are_drafting, firsts, NO_ENTRIES), states
        order = np.flatnonzero(are_drafted)
        order = order[np.argsort(-rows.num_drafts[order], kind="stable")]
        self.has_draft_tokens = len(order) > 0
        if not self.has_draft_tokens:
            return
        chosen, starts, counts = rows.slots[order], rows.starts[order], rows.num_drafts[order]
        first_keys = self._enter(chosen, starts, starts + 1)
        self._draft_tokens[:, : len(order)] = chosen, starts, counts, first_keys, states[order]
        self._mark(chosen, starts, starts + 1)
        self._drafted = chosen, starts, counts
        self._put(np.full((len(order), group - 1), -1))

    def draft_on_device(self) -> None:
        if not self.has_draft_tokens:
            return
        _, starts, counts = self._drafted
        for number in range(int(counts[0])):
            count = int((counts > number).sum())
            size = self._size_of(count, self._mode)
            splits = self._max_key_splits if size else -(-(int(starts[:count].max()) + number + 1) // KEY_SPLIT)
            self._layers_plan.draft(number, self._inputs.padded(size or count), splits, size)

    def fetch_draft_tokens(self) -> None:
        counts = self._drafted[2]
        self._put(self._layers_plan.draft_tokens(len(counts), int(counts[0])))

    def _put(self, token_ids: np.ndarray) -> None:
        """Write draft tokens of each row, int32 [n, most], after their slots' tokens; -1: only the device knows them."""
        slots, starts, counts = self._drafted
        rows = np.arange(len(slots)).repeat(counts)
        places = np.arange(len(rows)) - (np.cumsum(counts) - counts).repeat(counts)
        self._slots.token_ids[slots[rows], starts[rows] + 1 + places] = token_ids[rows, places]

    def store(self, plan: Plan, mode: StepMode) -> None:
        assert isinstance(plan, EagerPlan), "a device's"
        self._layers_plan.store(plan.hidden_there, mode.size if self._sizes and mode.size in plan.captured else 0)

    def keep(self, rows: StepRows, counts: np.ndarray, is_drafting: np.ndarray, kept_ends: np.ndarray, plan: Plan) -> None:
        slots, firsts, num_entries, _ = self._take(rows, counts, is_drafting, kept_ends, _NO_STATES)
        self._mark(slots, firsts, firsts + num_entries)
        own = rows.slots[rows.counts > 0]
        places = self._slots.hidden_positions[own] - rows.ends[rows.counts > 0] + self._memory.sizes.group
        self._slots.hidden_places[own] = np.where(self._slots.hidden_positions[own] < 0, 0, places)


"""+"""

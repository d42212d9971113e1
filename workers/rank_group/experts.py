"""A rank's part in computing the experts of all ranks: their placement, and the memory for rows and results.

Made by the worker, used by the runner. All members of the rank group run every step of its clock (`clock.py`), with rows or
without, and meet twice in each sparse layer: when rows are published, and when results are written. A result is stored with its
row, and the row's rank adds its results in a fixed order, so the placement of an expert changes no bit.
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint.comm_spec import expert_rows, expert_window_spans, expert_windows_bytes
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.parallel.placement import LayerPlacement, first_placement, owners, without_missing
from ops.cpu.rank_group import ExpertRankGroup
from workers.rank_group.communicator import Communicator

_PAGE = 4096


class ExpertRank:
    """`owners`: int32 [sparse layers, experts, 1 + ranks], at a fixed address that tapes read at each run. The first
    `--num-max-dispatch-tokens-per-rank` rows of each rank's window are resident from the start."""

    def __init__(self, communicator: Communicator, config: EngineConfig, model: ModelConfig) -> None:
        assert model.experts is not None, "the model has no experts"
        self.communicator = communicator
        num_ranks, group = communicator.count, config.tensor_parallel_size
        rows = expert_rows(group, config.max_num_batched_tokens, config.max_num_seqs)
        windows = communicator.memory[len(communicator.memory) - expert_windows_bytes(model, num_ranks, rows) :]
        spans = expert_window_spans(model, num_ranks, rows, config.num_max_dispatch_tokens_per_rank)
        for begin, end in spans if config.ops == "native" else ():  # other ops exchange rows elsewhere
            windows[[*range(begin, end, _PAGE), end - 1]].max()  # reading is enough, and changes nothing
        self.rank_group = ExpertRankGroup(communicator.native, windows, rows, communicator.rank // group * group, group)
        self._num_experts = model.experts.num_experts
        num_layers = len(model.experts.sparse_layers)
        num_redundant = config.num_redundant_experts
        first = first_placement(config.expert_placement_strategy, self._num_experts, num_ranks, num_redundant)
        self.num_slots = self._num_experts + num_redundant
        self.placement: tuple[LayerPlacement, ...] = (first,) * num_layers
        self.version = 0  # of the placement
        self.counts: np.ndarray | None = None  # uint64 [sparse layers, experts]: rows counted here
        self.owners = np.zeros((num_layers, self._num_experts, 1 + num_ranks), np.int32)

    def join(self) -> bool:
        """Join the rank group's epoch, and compute the experts of missing ranks too; return whether this rank is a member."""
        is_member = self.communicator.join()
        if is_member:
            self.place(self.placement, self.version)
        return is_member

    @property
    def epoch(self) -> int:
        return self.communicator.epoch

    def begin_step(self, number: int, weight_version: int) -> None:
        """Begin step `number` of the rank group. All ranks must have the same weights and the same placement."""
        self.communicator.begin_step(number, (weight_version & 0xFFFF) << 16 | self.version & 0xFFFF)

    def place(self, placement: tuple[LayerPlacement, ...], version: int) -> None:
        """Compute experts where `placement` says, from the next step on. While the group has no members (all died at once) none
        are computed: the tables are filled when this rank joins."""
        self.placement, self.version = placement, version
        if not self.communicator.members:
            return
        found: dict[LayerPlacement, np.ndarray] = {}
        for table, layer in zip(self.owners, placement, strict=True):
            if layer not in found:
                found[layer] = owners(without_missing(layer, self.communicator.members), self._num_experts)
            table[...] = found[layer]
